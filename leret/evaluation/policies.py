"""The policies of a run: named, opened, and handed back with the program."""

from __future__ import annotations

from leret.config.policy import PolicySettings
from leret.core.bundled import demo_policy
from leret.core.runs import Run
from leret.evaluation.evaluator import Policies
from leret.evaluation.systems import System
from leret.policies.base import Policy
from leret.policies.checkpoints import find_model, model_digest
from leret.policies.load import policy_of
from leret.programs.saved import save_program
from leret.sampling.rollouts.environment import Environment


def policies_of(run: Run) -> Policies:
    """How the run's policies are named and opened.

    Raises:
        RunError: the run was not sampled.
    """
    base = PolicySettings.model_validate(run.section("sampling", "leret sample RECIPE")["policy"])

    def name(system: System) -> str:
        settings = settings_of(system, base)
        if settings.kind != "local":
            return policy_of(settings).digest
        return model_digest(demo_policy() if settings.model == "demo" else find_model(settings.model))

    def open_policy(system: System) -> Policy:
        return policy_of(settings_of(system, base))

    return Policies(name, open_policy)


def settings_of(system: System | None, base: PolicySettings) -> PolicySettings:
    """A policy's settings: the base's, but that a trained one always runs in this process."""
    if system is None or system.directory is None:
        return base
    return base.in_process(str(system.directory.resolve()))


def deliver(run: Run, bench: Environment, system: System | None) -> None:
    """Write R/program: what `leret.load` needs to run the program with a policy.

    Args:
        run: its ``program`` directory is written.
        bench: of the run.
        system: the policy; None for the base.

    Raises:
        OSError: it cannot be written.
    """
    settings = bench.recipe.retriever
    index = settings.index
    if index is None and settings.index_kind is not None:
        index = str((bench.cache / settings.index_kind).resolve())
    save_program(
        run.program,
        bench.program(),
        bench.source,
        adapter=bench.recipe.program.adapter,
        policy=settings_of(system, bench.recipe.policy),
        retriever=settings.model_copy(update={"index": index}),
        data=bench.recipe.data,
    )
