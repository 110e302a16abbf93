"""`leret train`: a policy from a run's samples, through TRL's trainers, or from fresh samples of its tasks (`online`).

`train` makes a `TrainingJob` of a recipe and a run, and `fit` trains it: model and tokenizer (`model`), ids as the
sampler made them (`data`), refusals (`checks`), the algorithm's trainer (`algorithms`), checkpoints and the finished
directory (`checkpoints`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from leret.config.base import free_keys
from leret.config.policy import PickerSettings
from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.core.stages import check_resumable
from leret.core.types import Task
from leret.policies.checkpoints import pick_device, positions, refuse_changed_weights
from leret.policies.local.policy import out_of_memory
from leret.policies.serving.model import sampled_settings
from leret.sampling.rollouts.environment import Environment, questions_digest, refuse_changes_since_sampling
from leret.training.alarms import best_step
from leret.training.algorithms import ALGORITHMS, OnlineAlgorithm
from leret.training.algorithms.base import Algorithm, TrainerInputs, n_processes
from leret.training.callbacks import check_trackers, monitored, training_callback
from leret.training.checkpoints import CheckpointDirectory, TrainingJob, TrainingRecord, TrainReport, checkpoint_step
from leret.training.checks import check_loss, check_parity, refuse_leaks
from leret.training.data import Encoded, TokenEncoder, TrainingExample, end_token, examples_digest, training_tasks
from leret.training.model import (
    InitialPolicy,
    find_initial,
    find_picker,
    library_of,
    load_for_training,
    save_policy,
    stop_ids,
    training_record,
    with_learning_rate,
)
from leret.training.online.recipe import RoundRecipe, TwoEngines
from leret.training.picking.recipe import PickingRecipe
from leret.training.process import Interrupt, training_process
from leret.training.validation import Validation, open_validation


@dataclass(frozen=True, slots=True)
class TrainEstimate:
    """What a training would do."""

    name: str
    algorithm: str
    initial: str
    examples: int  # before those that are too long are dropped; of an online algorithm, tasks
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
    job = make_job(recipe, run)
    with nullcontext() if job.validation is None else closing(job.validation.environment):
        report, is_main = train_job(job, progress)
    if is_main and not report.already:
        _note(job, run, report)
    return report


def train_job(
    job: TrainingJob, progress: Progress | None = None, *, interrupt: Interrupt | None = None
) -> tuple[TrainReport, bool]:
    """As `train`, of a job; an ``interrupt`` may come from another thread.

    Returns:
        The report, and whether this process is the one that writes, where several train together.
    """
    began = time.monotonic()
    directory = job.directory
    with nullcontext() if directory.policy.is_dir() else directory.lock():
        if directory.policy.is_dir():
            record = _finished(job)
            directory.clear()
            return record.report(directory.policy, time.monotonic() - began, already=True), True
        with nullcontext() if job.run is None else job.run.writing():
            before = directory.begun_with()
            if before is None:
                directory.begin(job.key)
            else:
                _check_same(job, before)
            try:
                return fit(job, progress or Silent(), interrupt or Interrupt())
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise TrainingError(
                    f"{job.recipe.policy_name} ran out of memory: lower per_device_train_batch_size (and raise "
                    "gradient_accumulation_steps) or max_length, set lora, or set optim: adafactor"
                ) from error


def estimate(recipe: TrainingRecipe, run: Run) -> TrainEstimate:
    """What `train` would do, without loading a model."""
    job = make_job(recipe, run)
    done = job.directory.policy.is_dir()
    if done:
        _finished(job)
    batches = -(-len(job.examples) // (recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps))
    steps = job.max_steps or max(1, round(batches * recipe.num_train_epochs))
    if isinstance(recipe, RoundRecipe):
        steps = recipe.n_steps(len(job.tasks))
    return TrainEstimate(
        name=recipe.policy_name,
        algorithm=recipe.algorithm,
        initial=str(job.initial.directory),
        examples=len(job.examples or job.tasks),
        steps=steps,
        done=done,
        resumes_at=checkpoint_step(job.directory.checkpoint()),
    )


def make_job(recipe: TrainingRecipe, run: Run) -> TrainingJob:
    """What a recipe asks for, resolved in a run."""
    check_trackers(recipe)
    recipe, algorithm = _with_predictors(recipe, run), ALGORITHMS[recipe.algorithm]
    if isinstance(recipe, PickingRecipe):
        initial = find_picker(run, recipe)
    else:
        initial = find_initial(run, recipe.init_from, recipe.predictors)
        recipe = with_learning_rate(recipe, initial)
    examples: Sequence[TrainingExample] = ()
    tasks: Sequence[Task] = ()
    refuse_changes_since_sampling(run, "train")
    if isinstance(algorithm, OnlineAlgorithm):
        with Environment.open(run) as environment:
            tasks = training_tasks(environment, cast(RoundRecipe, recipe))
            digests = {"data": questions_digest(tasks), "program": environment.program_digest}
        ids = {task.id for task in tasks}
    else:
        examples = algorithm.read_examples(recipe, run)
        digests = {"data": examples_digest(examples)}
        ids = {example.task_id for example in examples}
    digests["parent"] = initial.digest
    refuse_leaks(run, ids)
    validation = open_validation(recipe, run, ids)
    if validation is not None:
        digests["validation"] = validation.digest
        examples = [example for example in examples if example.task_id not in validation.ids]
        tasks = [task for task in tasks if task.id not in validation.ids]
        if not (examples or tasks):
            raise TrainingError("eval_tasks: all that could be trained on is of the validation's tasks; lower it")
    return TrainingJob(
        recipe,
        initial,
        examples,
        CheckpointDirectory(run.policies, recipe.policy_name),
        key={"recipe": recipe.model_dump(mode="json"), "digest": digests},
        max_steps=recipe.max_steps or _matched_steps(run, recipe, initial),
        enable_thinking=sampled_settings(run, recipe.predictors).get("enable_thinking"),
        check=partial(check_parity, run, initial, examples, predictors=recipe.predictors),
        validation=validation,
        event=partial(run.event, "train"),
        run=run,
        tasks=tasks,
    )


def _with_predictors(recipe: TrainingRecipe, run: Run) -> TrainingRecipe:
    """The recipe with the predictors that it trains, where those of the run have several policies."""
    policies = run.section("sampling", "leret sample RECIPE").get("policies")
    if not policies or recipe.predictors is not None:
        return recipe
    picks = isinstance(recipe, PickingRecipe)
    with Environment.open(run) as environment:
        names, policy_of = environment.replay.names, environment.recipe.policy_of
        fitting = [name for name in names if isinstance(policy_of([name]), PickerSettings) is picks]
    own = [name for name in fitting if name not in policies] or fitting
    if not own:
        what = "a picker" if picks else "a policy that writes"
        raise TrainingError(f"algorithm: {recipe.algorithm} trains {what}, and none answers in {run.path}")
    return recipe.model_copy(update={"predictors": tuple(own)})


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
    refuse_changed_weights(job.directory.policy)
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
    training = {**json.loads(json.dumps(job.key)), "steps": report.steps, "total_steps": report.total_steps}
    run.update(keep=True, training={name: training})
    run.event("train", "done", policy=name, algorithm=job.recipe.algorithm, **facts)


def refuse_processes(recipe: TrainingRecipe) -> None:
    """Refuse an algorithm of leret's own loop, which samples and trains in one process."""
    if isinstance(recipe, RoundRecipe) and not recipe.by_trl:
        other = ", or set engine: trl and states: stored" if isinstance(recipe, TwoEngines) else ""
        raise TrainingError(
            f"algorithm: {recipe.algorithm} samples and trains in one process: start it without --launch{other}"
        )


def fit(job: TrainingJob, progress: Progress, interrupt: Interrupt) -> tuple[TrainReport, bool]:
    """Train and publish one policy, or go on with it from its last checkpoint; returns what `train_job` does."""
    began = time.monotonic()
    recipe, directory = job.recipe, job.directory
    algorithm, device = ALGORITHMS[recipe.algorithm], pick_device(recipe.device)
    if isinstance(algorithm, OnlineAlgorithm) and not cast(RoundRecipe, recipe).by_trl:
        if n_processes() > 1:
            refuse_processes(recipe)
        from leret.training.online.loop import fit_online

        return fit_online(job, algorithm, progress, interrupt), True
    with training_process(recipe.threads if device == "cpu" else None), ExitStack() as opened:
        model, tokenizer = load_for_training(job.initial, recipe.lora, recipe.dtype)
        make = _trl_online if isinstance(algorithm, OnlineAlgorithm) else _trainer
        trainer, n_examples, difference = make(job, TrainerInputs(model, tokenizer, (), directory.path, device), opened)
        resumed_from = 0 if job.max_steps == 0 else _step(trainer, job, tokenizer, progress, interrupt)
        steps, seconds = int(trainer.state.global_step), time.monotonic() - began
        log = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
        record = TrainingRecord.of(
            job,
            log,
            examples=n_examples,
            dropped=max(0, len(job.examples) - n_examples),
            steps=steps,
            seconds=round(seconds, 3),
            preflight=difference,
        )
        _save(trainer, tokenizer, record, algorithm.describe(recipe), job)
    report = record.report(directory.policy, time.monotonic() - began, resumed_from=resumed_from)
    return report, bool(trainer.is_world_process_zero())


def _trainer(job: TrainingJob, inputs: TrainerInputs, _: ExitStack) -> tuple[Any, int, float | None]:
    """The trainer of examples, their number, and how far its loss is from the oracle's, where that is known."""
    recipe, algorithm = job.recipe, cast(Algorithm, ALGORITHMS[job.recipe.algorithm])
    examples = _encode(job, inputs.model, inputs.tokenizer)
    trainer = algorithm.make_trainer(recipe, replace(inputs, examples=examples, max_steps=job.max_steps))
    return trainer, len(examples), check_loss(trainer, recipe, algorithm)


def _trl_online(job: TrainingJob, inputs: TrainerInputs, opened: ExitStack) -> tuple[Any, int, float | None]:
    """TRL's trainer of fresh samples, and the number of states; as many steps as our loop takes."""
    from leret.sampling.rollouts.environment import Environment
    from leret.training.online.trl import make_trainer

    assert job.run is not None
    recipe, environment = cast(TwoEngines, job.recipe), opened.enter_context(Environment.open(job.run))
    inputs = replace(inputs, max_steps=recipe.n_steps(len(job.tasks)))
    trainer, states = make_trainer(recipe, inputs, job.initial, environment, job.run, job.tasks)
    opened.enter_context(closing(states))
    return trainer, len(states.rows["state"]), None


def _encode(job: TrainingJob, model: Any, tokenizer: Any) -> list[Encoded]:
    encoder = TokenEncoder(tokenizer, end_token(tokenizer, stop_ids(model)), job.enable_thinking)
    encoded = encoder.encode(job.examples)
    job.check(encoder, encoded)
    limit = min(job.recipe.max_length, positions(model) or job.recipe.max_length)
    fitting = [example for example in encoded if example.length <= limit]
    if not fitting:
        shortest = min(example.length for example in encoded)
        raise TrainingError(
            f"none of {len(encoded)} examples fits into {limit} tokens (the shortest has {shortest}); raise max_length "
            f"({job.recipe.max_length}), up to the policy's {positions(model)}, or shorten the prompts of the program"
        )
    return fitting


def _step(trainer: Any, job: TrainingJob, tokenizer: Any, progress: Progress, interrupt: Interrupt) -> int:
    from transformers import PrinterCallback

    recipe, directory = job.recipe, job.directory
    directory.drop_broken()
    checkpoint = directory.checkpoint()
    if checkpoint is None or not _take_finished(trainer, checkpoint):
        trainer.remove_callback(PrinterCallback)
        stage, writes = f"train {recipe.policy_name}", trainer.is_world_process_zero()
        validate = None if job.validation is None else partial(_validate, trainer, job.validation, tokenizer)
        with monitored(recipe, directory.path, job.event, writes=writes) as monitor, interrupt.handled():
            trainer.add_callback(training_callback(trainer, monitor, stage, progress, interrupt, validate))
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            monitor.check()
    best = best_step(trainer.state.log_history, recipe.metric_for_best_model)
    if best not in (None, trainer.state.global_step):
        trainer._load_from_checkpoint(str(directory.path / f"checkpoint-{best}"))
    return checkpoint_step(checkpoint)


def _validate(trainer: Any, validation: Validation, tokenizer: Any, step: int) -> dict[str, float]:
    return validation.run_model(trainer.accelerator.unwrap_model(trainer.model), tokenizer, step)


def _take_finished(trainer: Any, checkpoint: Path) -> bool:
    """Load a checkpoint of the last step: the trainer, asked to go on from one, takes a step too many."""
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps:
        return False
    if trainer.is_deepspeed_enabled:
        raise TrainingError(
            "the training was stopped between its last step and its end, and DeepSpeed loads no weights outside a "
            f"step: remove {checkpoint}, and the same command goes on from the checkpoint before"
        )
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    return True


def _save(trainer: Any, tokenizer: Any, record: TrainingRecord, method: str, job: TrainingJob) -> None:
    """Write the policy whole and publish it; nothing in it is a pickle."""
    accelerator, final = trainer.accelerator, job.directory.final
    model = accelerator.unwrap_model(trainer.model)
    state = accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        save_policy(model, tokenizer, final, state)
        trainer.state.save_to_json(str(final / "trainer_state.json"))
        record.write(final, method, job.initial.base_model, library_of(model))
        job.directory.publish()
    accelerator.wait_for_everyone()
