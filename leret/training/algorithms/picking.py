"""The trainings of pickers: `pqn` and `pick`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leret.training.online.algorithm import OnlineAlgorithm
from leret.training.picking.recipe import PickRecipe, PQNRecipe

if TYPE_CHECKING:
    from leret.training.online.algorithm import Learner


def _by_groups(*given: Any) -> Learner:
    from leret.training.picking.groups import GroupMethod
    from leret.training.picking.learner import PickLearner

    return PickLearner(GroupMethod, *given)


def _by_values(*given: Any) -> Learner:
    from leret.training.picking.learner import PickLearner
    from leret.training.picking.values import ValueMethod

    return PickLearner(ValueMethod, *given)


def _describe_pick(recipe: PickRecipe) -> str:
    names = {
        "grpo": "group-relative advantages (arXiv 2402.03300)",
        "dpo": "direct preference optimization (arXiv 2305.18290)",
        "ipo": "identity preference optimization (arXiv 2310.12036)",
        "sft": "imitation of the best picks",
    }
    return f"{names[recipe.loss]}, {recipe.num_generations} picks a state"


def _describe_pqn(recipe: PQNRecipe) -> str:
    return f"parallel Q-learning of a picker (Q-RAG, arXiv 2511.07328), lambda {recipe.lam}, alpha {recipe.temperature}"


PICK = OnlineAlgorithm(PickRecipe, _by_groups, _describe_pick)
PQN = OnlineAlgorithm(PQNRecipe, _by_values, _describe_pqn)
