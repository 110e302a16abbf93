"""Environment of online trainings of `leret.LeReT`: rounds run the student, and its other LMs keep answering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy

from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe, SamplingSettings
from leret.policies.base import Policy
from leret.programs.needs import NeedsCompletion
from leret.programs.runner import ProgramRunner
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Role
from leret.rollouts.environment import Environment


class StudentEnvironment(Environment):
    """An environment over a student instead of a recipe's program.

    ``lm`` is the one in training, and ``role`` chooses the policy that answers a call, given the policy in training.
    ``retriever`` answers all searches; None if each `leret.Search` has its own, or ``rm`` searches in its place.
    ``settings`` may hold functions as rewards.
    """

    def __init__(
        self,
        program: dspy.Module,
        adapter: dspy.Adapter,
        retriever: Retriever | None,
        rm: Any,
        lm: dspy.LM,
        role: Callable[[NeedsCompletion, Policy], Role],
        settings: SamplingSettings,
        cache: Path,
    ) -> None:
        decoding = {name: lm.kwargs[name] for name in ("temperature", "max_tokens", "top_p") if lm.kwargs.get(name)}
        decoding["enable_thinking"] = lm.engine.settings.enable_thinking
        policy = LocalPolicySettings(model=lm.model.removeprefix("leret/")).model_copy(update=decoding)
        keys: dict[str, Any] = {"policy": policy, "policies": {}, "sampling": settings}
        super().__init__(SamplingRecipe.model_construct(**keys), cache)
        self.role, self.retriever = role, retriever  # type: ignore[assignment]
        self._program, self._adapter, self._rm = program, adapter, rm

    def runner(self, searches: SearchBatcher | None) -> ProgramRunner:
        return ProgramRunner.over(self._program.deepcopy(), self._adapter, searches, self._rm)

    def policies(self, policy: Policy, predictors: Any) -> Policy:
        """Return the policy in training; `role` chooses the others."""
        return policy
