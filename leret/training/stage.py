"""`leret train`: a policy from a run's samples."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from leret.config.base import free_keys
from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import check_resumable
from leret.training.algorithms import ALGORITHMS
from leret.training.checkpoints import CheckpointDirectory, TrainingRecord, TrainReport, checkpoint_step
from leret.training.checks import check_parity
from leret.training.data import examples_digest, refuse_leaks
from leret.training.fit import TrainingJob, fit
from leret.training.model import InitialPolicy, find_initial, training_record


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a training would do."""

    name: str
    algorithm: str
    initial: str
    examples: int  # before those that are too long are dropped
    steps: int  # on one device, at most
    done: bool
    resumes_at: int  # step of the checkpoint to go on from; 0 for a fresh start


def train(recipe: TrainingRecipe, run: Run, *, progress: Progress | None = None) -> TrainReport:
    """Train one policy; go on where an earlier call was stopped; do nothing where it is there.

    Raises:
        TrainingError: the run has nothing to train on, an example belongs to the evaluation split, or a check refuses.
        PolicyError: the initial policy cannot be loaded.
        RunError: the run cannot be read or written, or the recipe differs from the one that the policy was begun with.
        KeyboardInterrupt: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    began = time.monotonic()
    job = make_job(recipe, run)
    directory = job.directory
    with nullcontext() if directory.policy.is_dir() else directory.lock():
        if directory.policy.is_dir():
            record = _finished(job)
            directory.clear()
            return record.report(directory.policy, time.monotonic() - began, already=True)
        with run.writing():
            before = directory.begun_with()
            if before is None:
                directory.begin(job.key)
            else:
                _check_same(job, before)
            report, is_main = fit(job, progress)
    if is_main:
        _note(job, run, report)
    return report


def plan(recipe: TrainingRecipe, run: Run) -> TrainPlan:
    """What `train` would do, without loading a model."""
    job = make_job(recipe, run)
    done = job.directory.policy.is_dir()
    if done:
        _finished(job)
    batches = -(-len(job.examples) // (recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps))
    return TrainPlan(
        name=recipe.policy_name,
        algorithm=recipe.algorithm,
        initial=str(job.initial.directory),
        examples=len(job.examples),
        steps=job.max_steps or max(1, round(batches * recipe.num_train_epochs)),
        done=done,
        resumes_at=checkpoint_step(job.directory.checkpoint()),
    )


def make_job(recipe: TrainingRecipe, run: Run) -> TrainingJob:
    """What a recipe asks for, resolved in a run."""
    initial = find_initial(run, recipe.init_from)
    examples = ALGORITHMS[recipe.algorithm].read_examples(recipe, run)
    refuse_leaks(run, examples)
    manifest = run.manifest()
    return TrainingJob(
        recipe,
        initial,
        examples,
        CheckpointDirectory(run.policies, recipe.policy_name),
        key={
            "recipe": recipe.model_dump(mode="json"),
            "digest": {"data": examples_digest(examples), "parent": initial.digest},
        },
        max_steps=_matched_steps(run, recipe, initial),
        enable_thinking=run.section("sampling", "leret sample RECIPE").get("policy", {}).get("enable_thinking"),
        check=partial(check_parity, run, initial, examples),
        versions=dict(manifest.get("versions") or {}),
    )


def _matched_steps(run: Run, recipe: TrainingRecipe, initial: InitialPolicy) -> int | None:
    """Steps that are left to take, so as to have taken as many as another policy since the base."""
    if recipe.match_steps_of is None:
        return None
    total = training_record(run.policies / recipe.match_steps_of).get("total_steps")
    if not total:
        raise TrainingError(
            f"match_steps_of: {run.path} has no trained policy {recipe.match_steps_of!r}; train it before this one"
        )
    if total <= initial.total_steps:
        raise TrainingError(
            f"match_steps_of: {recipe.match_steps_of!r} took {total} steps in all, and {recipe.init_from!r}, where "
            f"this training starts, {initial.total_steps} already; start from base"
        )
    return int(total) - initial.total_steps


def _finished(job: TrainingJob) -> TrainingRecord:
    """The record of the policy that is there; refused where it was trained from something else."""
    value = training_record(job.directory.policy)
    if not value:
        raise TrainingError(
            f"{job.directory.policy} is no policy of this run (it has no training.json); give this one another name"
        )
    _check_same(job, value["key"])
    return TrainingRecord(**value)


def _check_same(job: TrainingJob, before: dict[str, Any]) -> None:
    where = job.directory.policy if job.directory.policy.is_dir() else job.directory.path
    check_resumable(
        where,
        {**before.get("recipe", {}), "digest": before.get("digest", {})},
        {**job.key["recipe"], "digest": job.key["digest"]},
        free_keys(type(job.recipe)),
        otherwise="give this one another `name`, or remove that directory",
    )


def _note(job: TrainingJob, run: Run, report: TrainReport) -> None:
    facts = {name: getattr(report, name) for name in ("steps", "total_steps", "examples", "dropped")}
    facts |= {"seconds": round(report.seconds, 3), "loss": report.loss_last}
    name = job.recipe.policy_name
    training = dict(run.manifest().get("training") or {})
    training[name] = {**json.loads(json.dumps(job.key)), "steps": report.steps, "total_steps": report.total_steps}
    run.update(training=training)
    run.event("train", "done", policy=name, algorithm=job.recipe.algorithm, **facts)
