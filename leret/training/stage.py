"""`leret train`: a policy from a run's samples."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.training.checkpoints import Workplace, differing
from leret.training.data import Example, examples_digest, read_preferences, read_targets
from leret.training.initial import Initial, find_initial, trained_record
from leret.training.record import Record, TrainReport


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a training would do.

    Attributes:
        examples: pairs, or targets, before those that are too long are dropped.
        steps: optimizer steps on one device, at most.
        done: the policy is there; nothing would be done.
        resumes_at: step of the checkpoint to go on from; 0 for a fresh start.
    """

    name: str
    algorithm: str
    initial: str
    examples: int
    steps: int
    done: bool
    resumes_at: int


@dataclass(frozen=True, slots=True)
class _Job:
    """A training with its inputs resolved."""

    recipe: TrainingRecipe
    run: Run
    initial: Initial
    examples: list[Example]
    max_steps: int | None
    key: dict[str, Any]
    workplace: Workplace


def train(
    recipe: TrainingRecipe,
    run: Run,
    *,
    progress: Progress | None = None,
) -> TrainReport:
    """Train one policy; go on where an earlier call was stopped; do nothing where it is there.

    Args:
        recipe: what to train.
        run: a sampled run.
        progress: shown while it trains.

    Returns:
        What was done.

    Raises:
        TrainingError: the run has nothing to train on, an example belongs to the evaluation split, the recipe differs
            from the one that the policy was begun or finished with, or the pre-flight refuses.
        PolicyError: the initial policy cannot be loaded.
        RunError: the run cannot be read or written.
        KeyboardInterrupt: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    began = time.monotonic()
    job = _resolve(recipe, run)
    with nullcontext() if job.workplace.policy.is_dir() else job.workplace.lock():
        if job.workplace.policy.is_dir():
            record = _finished(job)
            job.workplace.clear()
            return record.report(job.workplace.policy, time.monotonic() - began, already=True)
        with run.writing():
            job.workplace.begin(job.key)
        return _train(job, progress, began)


def plan(recipe: TrainingRecipe, run: Run) -> TrainPlan:
    """What `train` would do, without loading a model.

    Raises:
        LeretError: as `train` does, for what can be seen without the model.
    """
    job = _resolve(recipe, run)
    done = job.workplace.policy.is_dir()
    if done:
        _finished(job)
    checkpoint = job.workplace.checkpoint()
    batches = -(-len(job.examples) // (recipe.batch_size * recipe.accumulate))
    return TrainPlan(
        name=recipe.policy_name,
        algorithm=recipe.algorithm,
        initial=str(job.initial.directory),
        examples=len(job.examples),
        steps=job.max_steps or max(1, round(batches * recipe.epochs)),
        done=done,
        resumes_at=int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0,
    )


def _resolve(recipe: TrainingRecipe, run: Run) -> _Job:
    from leret.training.data import refuse_leaks

    initial = find_initial(run, recipe.init)
    examples = _examples(recipe, run)
    refuse_leaks(run, examples)
    key = {
        "recipe": recipe.model_dump(mode="json"),
        "data": examples_digest(examples),
        "parent": {"init": recipe.init, "digest": initial.digest},
    }
    max_steps = _matched_steps(run, recipe, initial)
    return _Job(recipe, run, initial, examples, max_steps, key, Workplace(run.policies, recipe.policy_name))


def _examples(recipe: TrainingRecipe, run: Run) -> list[Example]:
    if recipe.algorithm != "sft":
        return read_preferences(run.preferences)
    from leret.sampling.preferences.sft_targets import sft_targets
    from leret.sampling.store.store import Store

    with Store(run.store, read_only=True) as store:
        targets = sft_targets(
            store,
            which=recipe.targets,
            only_spread=recipe.only_spread,
            max_targets=recipe.max_targets,
            seed=recipe.seed,
            policy_digest=run.manifest().get("digests", {}).get("policy"),
        )
        return read_targets(targets)


def _matched_steps(run: Run, recipe: TrainingRecipe, initial: Initial) -> int | None:
    """Steps that are left to take, so as to have taken as many as another policy since the base."""
    if recipe.match_steps_of is None:
        return None
    total = trained_record(run.policies / recipe.match_steps_of).get("total_steps")
    if not total:
        raise TrainingError(
            f"match_steps_of: {run.path} has no trained policy {recipe.match_steps_of!r}; train it before this one"
        )
    if total <= initial.total_steps:
        raise TrainingError(
            f"match_steps_of: {recipe.match_steps_of!r} took {total} steps in all, and {recipe.init!r}, where this "
            f"training starts, {initial.total_steps} already; start from base"
        )
    return int(total) - initial.total_steps


def _finished(job: _Job) -> Record:
    """The record of the policy that is there.

    Raises:
        TrainingError: it was trained from another recipe, other data or another parent.
    """
    path = job.workplace.policy
    value = trained_record(path)
    if not value:
        raise TrainingError(f"{path} is no policy of this run (it has no training.json); give this one another name")
    changed = differing(value["key"], job.key)
    if changed:
        raise TrainingError(
            f"{path} is there, and differs in {'; '.join(changed)}. Give this one another name, or remove that "
            "directory"
        )
    return Record(**value)


def _train(job: _Job, progress: Progress | None, began: float) -> TrainReport:
    from leret.training.fit import fit

    result = fit(
        job.recipe,
        job.run,
        job.initial,
        job.examples,
        job.workplace,
        max_steps=job.max_steps,
        key=job.key,
        progress=progress,
    )
    report = result.record.report(job.workplace.policy, time.monotonic() - began, resumed_from=result.resumed_from)
    if result.main:
        _note(job, report)
    return report


def _note(job: _Job, report: TrainReport) -> None:
    facts = {
        "steps": report.steps,
        "total_steps": report.total_steps,
        "seconds": round(report.seconds, 3),
        "examples": report.examples,
        "dropped": report.dropped,
        "loss": report.loss_last,
    }
    name = job.recipe.policy_name
    training = dict(job.run.manifest().get("training") or {})
    training[name] = {**json.loads(json.dumps(job.key)), "steps": report.steps, "total_steps": report.total_steps}
    job.run.update(training=training)
    job.run.event("train", "done", policy=name, algorithm=job.recipe.algorithm, **facts)
