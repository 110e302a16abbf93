"""A training with its inputs, its directory, and what a finished policy says about itself.

::

    R/policies/.NAME/started.json      what is being trained: refused when another recipe comes to go on with it
    R/policies/.NAME/checkpoint-N/     Hugging Face Trainer's: weights, optimizer, schedule, random states
    R/policies/.NAME/final/            the finished policy, renamed to R/policies/NAME when it is whole
    R/policies/NAME/training.json      the record, for programs; README.md, for people
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.training import TrainingRecipe
from leret.core.errors import RunError
from leret.core.files import locked, write_atomically
from leret.core.runs import Run, versions
from leret.core.types import Task
from leret.policies.checkpoints import policy_digest
from leret.training.alarms import best_step, first_alarms
from leret.training.data import Encoded, TokenEncoder, TrainingExample
from leret.training.model import InitialPolicy
from leret.training.validation import Validation

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment


class CheckpointDirectory:
    """Where one policy is trained: ``R/policies/.NAME``."""

    def __init__(self, policies: Path, name: str) -> None:
        self.path = policies / f".{name}"
        self.final = self.path / "final"
        self.policy = policies / name
        self._started = self.path / "started.json"

    def lock(self) -> AbstractContextManager[Any]:
        """Held while a policy is trained; of the processes of one training, by the first. RunError if taken."""
        busy = RunError(f"{self.path} is being trained by another process; wait for it, or stop it")
        return nullcontext() if os.environ.get("RANK", "0") != "0" else locked(self.path / "training.lock", busy)

    def begun_with(self) -> dict[str, Any] | None:
        """The key of the training that was begun here and not finished."""
        return json.loads(self._started.read_text(encoding="utf-8")) if self._started.is_file() else None

    def begin(self, key: Mapping[str, Any]) -> None:
        """Note what is trained: recipe and digests, values of JSON."""
        write_atomically(self._started, json.dumps(key, indent=1, ensure_ascii=False))

    def checkpoint(self) -> Path | None:
        """The last whole checkpoint. The trainer's state is written last, so one that can be read is whole."""
        found = sorted(self.path.glob("checkpoint-*"), key=checkpoint_step, reverse=True)
        return next((path for path in found if _whole(path)), None)

    def drop_broken(self) -> None:
        """Remove checkpoints that a crash cut off, which would be counted among the ones to keep."""
        for path in self.path.glob("checkpoint-*"):
            if not _whole(path):
                shutil.rmtree(path)

    def publish(self) -> None:
        """Make the finished policy the run's, in one step, and remove what led to it."""
        logs = self.path / "logs"
        if logs.is_dir():
            logs.rename(self.final / "logs")
        self.final.rename(self.policy)
        self.clear()

    def clear(self) -> None:
        """Remove what led to a finished policy."""
        shutil.rmtree(self.path, ignore_errors=True)


def checkpoint_step(path: Path | None) -> int:
    """The step of ``checkpoint-N``; 0 for None."""
    return int(path.name.rsplit("-", 1)[1]) if path else 0


def _whole(path: Path) -> bool:
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training with its inputs: what a recipe and a run make, or other code."""

    recipe: TrainingRecipe
    initial: InitialPolicy
    examples: Sequence[TrainingExample]
    directory: CheckpointDirectory
    key: Mapping[str, Any]  # what the result follows from; stands in training.json
    max_steps: int | None  # optimizer steps instead of the recipe's epochs; 0 gives the initial policy again
    enable_thinking: bool | None  # of the chat template, as the examples were sampled
    check: Callable[[TokenEncoder, Sequence[Encoded]], None]  # refuses examples that were not sampled so
    validation: Validation | None = None
    event: Callable[..., None] | None = None  # of `Run.event`, for alarms
    run: Run | None = None  # of an online algorithm, which samples its tasks instead of reading examples
    tasks: Sequence[Task] = ()
    environment: Environment | None = None  # of an online algorithm; None: the run's


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What the stage did."""

    path: Path
    steps: int  # of this training, the ones before an interruption included
    total_steps: int  # with those of the policies it started from
    seconds: float  # wall clock of this call
    examples: int
    dropped: int  # examples longer than the policy or the recipe takes
    loss_first: float | None
    loss_last: float | None
    already: bool = False  # the policy was there, and nothing was done
    resumed_from: int = 0  # step of the checkpoint that this call went on from
    best_step: int | None = None  # whose weights the policy has, by the validation
    alarms: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        few = f"{self.examples} examples made {self.steps} steps, which teach little; sample more questions"
        return [few] if self.steps < 10 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Content of training.json.

    Attributes:
        key: the resolved recipe, the digests of the data and of the parent: what must be the same for a finished
            training to be the one that is asked for.
        log_history: one mapping a logged step: step, epoch, loss, grad_norm, learning_rate, and for pairs
            rewards/accuracies, rewards/margins, logps/chosen ...; of a validation eval_MEASURE, eval_unparsed.
        best_step: the step whose weights were kept, by the validation; None without one: those of the last step.
        alarms: name, step and message of each, see `leret.training.alarms`.
        validation: ids of its tasks.
        weights: digest of what was written; empty in older records.
    """

    name: str
    algorithm: str
    key: Mapping[str, Any]
    parent: str  # init_from of the recipe
    examples: int
    dropped: int = 0
    steps: int
    total_steps: int
    seconds: float
    preflight: float | None = None  # of `check_loss`
    versions: Mapping[str, str | None]
    log_history: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    best_step: int | None = None
    alarms: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    validation: Sequence[str] = field(default_factory=tuple)
    weights: str = ""

    @classmethod
    def of(cls, job: TrainingJob, log: Sequence[Mapping[str, Any]], **facts: Any) -> TrainingRecord:
        """The record of a training; ``facts`` are its counts, ``seconds`` and ``preflight``."""
        recipe, measure = job.recipe, job.recipe.metric_for_best_model
        return cls(
            name=recipe.policy_name,
            algorithm=recipe.algorithm,
            key=job.key,
            parent=recipe.init_from,
            total_steps=job.initial.total_steps + facts["steps"],
            versions=versions(),
            log_history=log,
            best_step=best_step(log, measure),
            alarms=[asdict(alarm) for alarm in first_alarms(log, measure)],
            validation=sorted(job.validation.ids) if job.validation else (),
            **facts,
        )

    def report(self, path: Path, seconds: float, *, already: bool = False, resumed_from: int = 0) -> TrainReport:
        """What the stage returns for this policy."""
        losses = [float(entry["loss"]) for entry in self.log_history if "loss" in entry]
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        counts = (self.steps, self.total_steps, seconds, self.examples, self.dropped)
        names = tuple(alarm["name"] for alarm in self.alarms)
        return TrainReport(path, *counts, first, last, already, resumed_from, self.best_step, names)

    def write(self, directory: Path, method: str, base_model: str, library: str) -> None:
        """training.json and README.md into a policy's directory."""
        write_atomically(directory / "README.md", model_card(self, method, base_model, library))
        value = {**asdict(self), "weights": policy_digest(directory)}
        write_atomically(directory / "training.json", json.dumps(value, indent=1, ensure_ascii=False))


_USE = {
    False: "It answers prompts as the program's adapter formats them; any server of the OpenAI protocol can serve it.",
    True: "It answers the program's `leret.Pick`; encoders of it are sentence-transformers directories.",
}


def model_card(record: TrainingRecord, method: str, base_model: str, library: str) -> str:
    """README.md of a policy, with the front matter of a Hugging Face model card."""
    last: Mapping[str, Any] = next((entry for entry in reversed(record.log_history) if "loss" in entry), {})
    figures = {name: f"{value:.6g}" for name, value in last.items() if isinstance(value, int | float)}
    picks = library not in {"peft", "transformers"}
    quoted = base_model.replace("\\", "\\\\").replace('"', '\\"')
    return f"""---
library_name: {library}
base_model: "{quoted}"
pipeline_tag: {"sentence-similarity" if picks else "text-generation"}
tags: [leret, {"picker" if picks else "trl"}, {record.algorithm}]
---

# {record.name}

A {"picker of candidates" if picks else "policy that writes search queries"}, trained by leret: {method}.

It started from `{record.parent}` and took {record.steps} steps ({record.total_steps} since the base) on \
{record.examples} examples; {record.dropped} were too long and left out.{_kept(record)}

## Recipe

{_table("key", {name: f"`{value}`" for name, value in record.key["recipe"].items()})}

## Last logged step

{_table("measure", figures)}

## Use

{_USE[picks]} `leret.load` of the run's `program` directory gives the program with a policy.
Evaluation is in the run's `eval/summary.json`; the whole training log is in `training.json`.
"""


def _kept(record: TrainingRecord) -> str:
    """What the validation and the alarms say, for the model card."""
    said = [f"Alarm at step {alarm['step']}: {alarm['message']}." for alarm in record.alarms]
    if record.best_step is not None:
        figures = ((e["step"], n, v) for e in record.log_history for n, v in e.items() if n.startswith("eval_"))
        points = ", ".join(f"{value:.3f} at step {step}" for step, n, value in figures if n != "eval_unparsed")
        said.insert(0, f"The weights are those of step {record.best_step}, the best of the validation: {points}.")
    return "".join(f"\n\n{line}" for line in said)


def _table(head: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"| {head} | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
