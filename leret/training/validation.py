"""Validation during training: the program on held-out tasks, greedy and zero-shot, as in `leret eval`.

Validation tasks come from split dev, or from split train (and are then excluded from training), but
never from split test. Training chooses its best step by these tasks, so `leret eval` refuses to use
the tasks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leret.config.training import TrainingRecipe
from leret.core.classes import sources_digest
from leret.core.errors import DataError, PolicyError, TrainingError
from leret.core.types import Outcome, Rollout, Task, digest
from leret.datasets.splits import rank_of
from leret.policies.base import Policy
from leret.rewards import scoring
from leret.training.processes import is_sharded

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment

_OTHER = (
    "set eval_split: train, which excludes eval_tasks tasks from training, or remove eval_steps"
)


@dataclass(frozen=True)
class Validation:
    """Validation tasks, and the environment that runs the program on the tasks."""

    environment: Environment
    tasks: Sequence[Task]
    measure: str
    # predictors in training; None if the run has one policy
    predictors: Sequence[str] | None = None

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(task.id for task in self.tasks)

    @property
    def digest(self) -> str:
        """Digest of the tasks, and of the measure's source code if it is a user's function."""
        return digest(sorted(self.ids), *filter(None, [sources_digest([self.measure])]))

    def run_model(self, model: Any, tokenizer: Any, step: int) -> dict[str, float]:
        """Return a causal LM's ``eval_MEASURE`` and ``eval_unparsed``, means over the tasks."""
        from leret.policies.local.policy import LocalPolicy

        settings = self.environment.recipe.policy_of(self.predictors)
        thinking = settings.model_dump().get("enable_thinking")
        name = f"step {step}"
        policy = LocalPolicy.over(
            model, tokenizer, name=name, digest=digest(name), enable_thinking=thinking
        )
        return self.run_policy(policy)

    def run_policy(self, policy: Policy) -> dict[str, float]:
        return self.figures(asyncio.run(self._rollouts(policy)))

    def figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the mean scores of rollouts without an ``error``.

        Raise an exception if more than half have one.
        """
        from leret.rollouts.failures import BOUNDARIES

        done = [rollout for rollout in rollouts if rollout.error is None]
        if 2 * len(done) < len(rollouts):
            failure = next(r.failure for r in rollouts if r.error is not None and r.failure)
            raise BOUNDARIES.get(failure.kind, PolicyError)(
                f"{len(rollouts) - len(done)} of {len(rollouts)} validation tasks failed; the "
                f"first failure: {failure.message}. Fix the cause and run the same command again"
            )
        tasks = {task.id: task for task in self.tasks}
        measure = scoring(self.measure)
        values = [measure(_outcome(tasks[rollout.task_id], rollout)) for rollout in done]
        scored = [float(value) for value in values if value is not None]
        if not scored:
            raise TrainingError(
                f"metric_for_best_model: no validation task has {self.measure}; choose another "
                "measure"
            )
        unparsed = sum(rollout.unparsed for rollout in done) / len(done)
        return {f"eval_{self.measure}": sum(scored) / len(scored), "eval_unparsed": unparsed}

    async def _rollouts(self, policy: Policy) -> list[Rollout]:
        from leret.retrieval.batching import SearchBatcher
        from leret.rollouts.actors import Decoding, PolicyActor
        from leret.rollouts.walk import RolloutRunner

        environment = self.environment
        policy = environment.policies(policy, self.predictors)
        recipe = environment.recipe
        limits = {name: settings.max_tokens for name, settings in recipe.policies.items()}
        decoding = Decoding(recipe.policy.max_tokens, limits=limits)
        actor = PolicyActor(policy, environment.formatter, decoding)
        with closing(SearchBatcher(environment.retriever)) as searches:
            async with aclosing(policy):
                return await RolloutRunner(environment.runner(searches), actor).run(self.tasks)


def open_validation(
    recipe: TrainingRecipe, environment: Environment, trained: Collection[str]
) -> Validation:
    """Choose the recipe's validation tasks, with ids outside ``trained`` as far as possible.

    Return the validation.
    """
    if is_sharded():
        raise TrainingError(
            "eval_steps: validation needs the whole model in each process, but fsdp and zero3 "
            "shard the model; remove eval_steps and compare policies with `leret eval`"
        )
    scoring(recipe.metric_for_best_model, "metric_for_best_model")
    seed = environment.recipe.data.seed
    try:
        split = environment.tasks(recipe.eval_split, check=False)
    except DataError as error:
        raise TrainingError(f"eval_split: {error}; {_OTHER}") from error
    tasks = [task for task in split if task.gold or task.answers]
    if not tasks:
        raise TrainingError(
            f"eval_split: no task in {recipe.eval_split} has gold documents or answers; {_OTHER}"
        )
    tasks.sort(key=lambda task: (task.id in trained, rank_of(task.id, seed, "validation")))
    return Validation(
        environment, tasks[: recipe.eval_tasks], recipe.metric_for_best_model, recipe.predictors
    )


def _outcome(task: Task, rollout: Rollout) -> Outcome:
    text = ""
    outputs: Mapping[str, Any] = {}
    if rollout.steps:
        last = rollout.steps[-1]
        text = last.completion or ""
        outputs = last.outputs or {}
    return Outcome(task, text, outputs, rollout.ranking, rollout.prediction, len(rollout.steps))
