"""The trainings of pickers: `pqn` and `pick`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leret.training.online.algorithm import OnlineAlgorithm
from leret.training.picking.recipe import PickRecipe, PQNRecipe

if TYPE_CHECKING:
    from leret.training.online.algorithm import Learner


def _learner(recipe: PickRecipe | PQNRecipe, *given: Any) -> Learner:
    from leret.training.picking.learner import PickLearner
    from leret.training.picking.methods import GroupMethod, ValueMethod

    return PickLearner(GroupMethod if isinstance(recipe, PickRecipe) else ValueMethod, recipe, *given)


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


PICK = OnlineAlgorithm(PickRecipe, _learner, _describe_pick)
PQN = OnlineAlgorithm(PQNRecipe, _learner, _describe_pqn)
