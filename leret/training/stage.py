"""`leret train`: train a policy on a run's samples, or on fresh samples of the run's tasks.

`train` makes a `TrainingJob` from a recipe and a run. `fit` trains the job: the algorithm makes an
engine (`leret.training.algorithms`), and the driver (`leret.training.driver`) runs the engine and
publishes the policy.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.policy import PickerSettings
from leret.config.training import RoundRecipe, TrainingRecipe
from leret.core.classes import sources_digest
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import Run, versions
from leret.core.stages import check_resumable, inputs_unchanged
from leret.policies.checkpoints import pick_device, refuse_changed_weights, sampled_settings
from leret.policies.local.chat_template import dated
from leret.policies.local.policy import out_of_memory
from leret.rollouts.environment import (
    Environment,
    questions_digest,
    refuse_changes_since_sampling,
    training_tasks,
)
from leret.training.algorithms import Algorithm
from leret.training.data import examples_digest
from leret.training.job import (
    CheckpointDirectory,
    Interrupt,
    TrainingJob,
    TrainingRecord,
    TrainReport,
    checkpoint_step,
    training_process,
)
from leret.training.model import InitialPolicy, training_record, with_learning_rate
from leret.training.processes import IS_MAIN
from leret.training.validation import open_validation
from leret.training.watch import check_trackers

_LOG = logging.getLogger("leret")


@dataclass(frozen=True, slots=True)
class TrainEstimate:
    """Estimate of `leret train --dry-run`."""

    name: str
    algorithm: str
    initial: str
    examples: int  # includes those that are too long; for online algorithms, the number of tasks
    steps: int  # maximum number of optimizer steps, on one device
    done: bool
    resumes_at: int  # step, or round, of the checkpoint to resume from; 0 for a fresh start


def train(recipe: TrainingRecipe, run: Run, *, progress: Progress | None = None) -> TrainReport:
    """Train one policy or resume its training; do nothing if the policy exists.

    Raises:
        TrainingError: the run has nothing to train on, an example is in the evaluation split, or a
            check fails.
        PolicyError: the initial policy cannot be loaded.
        RunError: the run cannot be read or written, or training began with a different recipe.
        KeyboardInterrupt: SIGINT or SIGTERM was received; a checkpoint was written first.
    """
    with dated(run.manifest.date), open_environment(recipe, run) as environment:
        job = make_job(recipe, run, environment)
        report = train_job(job, progress)
    if IS_MAIN and not report.already:
        figures = {
            "steps": report.steps,
            "total_steps": report.total_steps,
            "examples": report.examples,
            "dropped": report.dropped,
            "seconds": round(report.seconds, 3),
            "loss": report.loss_last,
        }
        name = job.recipe.policy_name
        training = {
            **json.loads(json.dumps(job.key)),
            "steps": report.steps,
            "total_steps": report.total_steps,
        }
        run.update(keep=True, training={name: training})
        run.event("train", "done", policy=name, algorithm=job.recipe.algorithm, **figures)
    return report


def train_job(
    job: TrainingJob, progress: Progress | None = None, *, interrupt: Interrupt | None = None
) -> TrainReport:
    """Train a prepared job, or report the finished policy if it exists."""
    began = time.monotonic()
    directory = job.directory
    with nullcontext() if directory.policy.is_dir() else directory.lock():
        if directory.policy.is_dir():
            record = _finished_record(job)
            directory.clear()
            return record.report(directory.policy, time.monotonic() - began, already=True)
        with nullcontext() if job.run is None else job.run.writing():
            before = directory.begun_with()
            if before is None:
                directory.begin(job.key)
            else:
                _check_same(job, before)
            try:
                return fit(job, progress or Progress(), interrupt or Interrupt())
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise TrainingError(
                    f"{job.recipe.policy_name} ran out of memory; lower "
                    "per_device_train_batch_size (and raise gradient_accumulation_steps) or "
                    "max_length, set lora, or set optim: adafactor"
                ).failed() from error


def fit(job: TrainingJob, progress: Progress, interrupt: Interrupt) -> TrainReport:
    """Train and publish one policy, from its last checkpoint if there is one."""
    from leret.training.driver import drive, publish

    began = time.monotonic()
    algorithm: Algorithm = job.recipe.find_algorithm()
    device = pick_device(job.recipe.device)
    threads = job.recipe.threads if device == "cpu" else None
    with training_process(threads), algorithm.engine(job, device) as engine:
        resumed_from = 0 if job.max_steps == 0 else drive(engine, job, progress, interrupt)
        record = publish(engine, job, algorithm.describe(job.recipe), time.monotonic() - began)
    return record.report(job.directory.policy, time.monotonic() - began, resumed_from=resumed_from)


def estimate(recipe: TrainingRecipe, run: Run) -> TrainEstimate:
    """Estimate examples and steps of `train` without loading a model."""
    with open_environment(recipe, run) as environment:
        job = make_job(recipe, run, environment)
    done = job.directory.policy.is_dir()
    if done:
        _finished_record(job)
    return TrainEstimate(
        name=recipe.policy_name,
        algorithm=recipe.algorithm,
        initial=str(job.initial.directory),
        examples=len(job.inputs),
        steps=job.max_steps or job.recipe.n_steps(len(job.inputs)),
        done=done,
        resumes_at=checkpoint_step(job.directory.checkpoint()),
    )


def open_environment(
    recipe: TrainingRecipe, run: Run
) -> AbstractContextManager[Environment | None]:
    """Open the run's environment if needed to sample, to validate or to choose predictors.

    Otherwise yield None.
    """
    several = run.sampling().get("policies")
    needed = recipe.find_algorithm().is_online or recipe.eval_steps or several
    return Environment.open(run, latest=True) if needed else nullcontext()


def make_job(recipe: TrainingRecipe, run: Run, environment: Environment | None) -> TrainingJob:
    """Make a job from a recipe and a run; ``environment`` comes from `open_environment`."""
    check_trackers(recipe.report_to)
    algorithm: Algorithm = recipe.find_algorithm()
    if environment is not None:
        recipe = _with_predictors(recipe, run, environment)
    initial = algorithm.find_initial(run, recipe)
    recipe = with_learning_rate(recipe, initial)
    if not inputs_unchanged(run.path, "sample"):
        refuse_changes_since_sampling(run, "train")
    dspy = versions()["dspy"]
    sampled_with = run.manifest.versions.get("dspy")
    if sampled_with not in (None, dspy):
        _LOG.warning(
            "the run was sampled with dspy %s, and dspy %s is installed; if their prompts differ, "
            "the policy is trained on prompts that it will not receive",
            sampled_with,
            dspy,
        )
    inputs: Sequence[Any]
    if algorithm.is_online:
        assert environment is not None
        assert isinstance(recipe, RoundRecipe)
        inputs = training_tasks(environment, recipe)
        digests = {"data": questions_digest(inputs), "program": environment.program_digest}
    else:
        stored: Any = algorithm
        inputs = stored.inputs(recipe, run)
        digests = {"data": examples_digest(inputs)}
    digests["parent"] = initial.digest
    paths = [name for name in (recipe.algorithm, str(getattr(recipe, "engine", ""))) if ":" in name]
    if paths:
        digests["algorithm"] = str(sources_digest(paths))
    name = "id" if algorithm.is_online else "task_id"
    ids = {getattr(item, name) for item in inputs}
    _refuse_leaks(run, ids)
    validation = None
    if recipe.eval_steps is not None and environment is not None:
        validation = open_validation(recipe, environment, ids)
        digests["validation"] = validation.digest
        inputs = [item for item in inputs if getattr(item, name) not in validation.ids]
        if not inputs:
            raise TrainingError(
                "eval_tasks: validation leaves no tasks for training; lower eval_tasks"
            )
    return TrainingJob(
        recipe,
        initial,
        inputs,
        CheckpointDirectory(run.path / recipe.folder, recipe.policy_name),
        key={"recipe": recipe.model_dump(mode="json"), "digest": digests},
        run=run,
        environment=environment,
        validation=validation,
        max_steps=_matched_steps(run, getattr(recipe, "match_steps_of", None), initial),
        enable_thinking=sampled_settings(run, getattr(recipe, "writer", recipe).predictors).get(
            "enable_thinking"
        ),
    )


def _refuse_leaks(run: Run, task_ids: Collection[str]) -> None:
    """Raise `TrainingError` if some of the tasks are in the recorded evaluation split."""
    if not run.held_out.is_file():
        raise TrainingError(
            f"{run.held_out} (list of evaluation tasks) is missing; write it with `leret sample`"
        )
    held_out = set(json.loads(run.held_out.read_text(encoding="utf-8")))
    leaked = sorted(held_out.intersection(task_ids))
    if leaked:
        raise TrainingError(
            f"{len(leaked)} training questions (by id or text) are also in the evaluation split: "
            f"{', '.join(map(repr, leaked[:5]))}; sample a new run from split train"
        )


def _with_predictors(recipe: TrainingRecipe, run: Run, environment: Environment) -> TrainingRecipe:
    policies = run.sampling().get("policies")
    if not policies or recipe.predictors is not None:
        return recipe
    names = environment.replay.names
    policy_of = environment.recipe.policy_of
    picks = [name for name in names if isinstance(policy_of([name]), PickerSettings)]
    writers = [name for name in names if name not in picks]

    shared_picks = [name for name in picks if name not in policies]
    shared_writers = [name for name in writers if name not in policies]
    trained = recipe.with_predictors(shared_picks or picks, shared_writers or writers)
    if trained.predictors == ():
        raise TrainingError(
            f"algorithm: {recipe.algorithm} trains {recipe.trains}, but no predictor of {run.path} "
            "uses one"
        )
    return trained


def _matched_steps(run: Run, name: str | None, initial: InitialPolicy) -> int | None:
    """Return how many steps to take to reach the total of policy ``name``; None without a name."""
    if name is None:
        return None
    total = training_record(run.policies / name).get("total_steps")
    if not total:
        raise TrainingError(
            f"match_steps_of: {run.path} has no trained policy {name!r}; train it before this one"
        )
    if total <= initial.total_steps:
        raise TrainingError(
            f"match_steps_of: {name!r} was trained for {total} steps in total, but "
            f"{initial.name!r} (init_from) was already trained for {initial.total_steps}; set "
            "init_from: base"
        )
    return int(total) - initial.total_steps


def _finished_record(job: TrainingJob) -> TrainingRecord:
    value = training_record(job.directory.policy)
    if not value:
        raise TrainingError(
            f"{job.directory.policy} is not a policy of this run (it has no training.json); choose "
            "another `name`"
        )
    _check_same(job, value["key"])
    refuse_changed_weights(job.directory.policy)
    return TrainingRecord(**value)


def _check_same(job: TrainingJob, before: dict[str, Any]) -> None:
    where = job.directory.policy if job.directory.policy.is_dir() else job.directory.path
    recipe = before["recipe"]
    with suppress(ValidationError):  # without removed keys, and with defaults of new ones
        recipe = TrainingRecipe.model_validate(recipe).model_dump(mode="json")
    check_resumable(
        where,
        {**recipe, "digest": before["digest"]},
        {**job.key["recipe"], "digest": job.key["digest"]},
        free_keys(job.recipe),
        otherwise="choose another `name`, or remove that directory",
    )
