"""Training jobs: process, directory, and the finished policy's record and model card.

::

    R/policies/.NAME/started.json      recipe and digests; resuming with a different recipe is refused
    R/policies/.NAME/checkpoint-N/     Hugging Face Trainer checkpoint: weights, optimizer, schedule, random states
    R/policies/.NAME/final/            finished policy, renamed to R/policies/NAME when complete
    R/policies/NAME/training.json      machine-readable record; README.md is the model card
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any

from leret.config.training import TrainingRecipe
from leret.core.errors import RunError
from leret.core.files import locked, rendered, write_atomically
from leret.core.runs import Run
from leret.core.types import Task
from leret.policies.checkpoints import policy_digest
from leret.training.data import TrainingExample
from leret.training.model import InitialPolicy, SavedPolicy
from leret.training.processes import IS_MAIN, N_PROCESSES, gather
from leret.training.validation import Validation
from leret.training.watch import PEAK, RATE

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment

_LOG = logging.getLogger("leret")

_DISK = (
    "No space left",
    "PytorchStreamWriter",
    "unexpected pos",
    "iostream error",
    "File too large",
    "os error 28",
)


@contextmanager
def training_process(threads: int | None) -> Iterator[None]:
    """Set the number of threads (1 for bit-identical results) and silence libraries.

    Restore both settings afterwards.

    If the disk is full, libraries raise different errors in the block; all of them become OSError.
    """
    import datasets
    import torch
    import transformers

    library = transformers.logging
    bars = os.environ.get("TQDM_DISABLE")
    with ExitStack() as before, warnings.catch_warnings(), _disk_errors():
        # Trainers reseed this generator, but other code draws ids from it.
        before.callback(random.setstate, random.getstate())
        before.callback(torch.set_num_threads, torch.get_num_threads())
        before.callback(library.set_verbosity, library.get_verbosity())
        if not datasets.are_progress_bars_disabled():
            before.callback(datasets.enable_progress_bars)
        if library.is_progress_bar_enabled():
            before.callback(library.enable_progress_bar)
        restore: Any = os.environ.pop if bars is None else os.environ.__setitem__
        before.callback(restore, "TQDM_DISABLE", bars)
        os.environ["TQDM_DISABLE"] = "1"  # hides TRL's progress bar for reference log-probabilities
        warnings.simplefilter("ignore", FutureWarning)
        datasets.disable_progress_bars()
        library.disable_progress_bar()
        library.set_verbosity_error()
        if threads is not None:
            torch.set_num_threads(threads)
        yield


@contextmanager
def _disk_errors() -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if any(sign in str(error) for sign in _DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


class Interrupt:
    """SIGINT or SIGTERM saves a checkpoint after the current step and stops training.

    A second signal stops at once.
    """

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Catch signals inside the block.

        Raise KeyboardInterrupt at the end of the block if a signal came.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        # only the main thread can handle signals
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._stop) for number in numbers if main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.requested:
            raise KeyboardInterrupt

    def agree(self) -> bool:
        """Return True, in all processes of the training, if one of them received a signal."""
        if N_PROCESSES > 1:
            self.requested = any(gather(self.requested))
        return self.requested

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGINT and IS_MAIN:
            _LOG.warning(
                "stopping after this step; press Ctrl-C again to stop without a checkpoint"
            )


class CheckpointDirectory:
    """Working directory for training one policy: ``R/policies/.NAME``."""

    def __init__(self, policies: Path, name: str) -> None:
        self.path = policies / f".{name}"
        self.final = self.path / "final"
        self.policy = policies / name
        self._started = self.path / "started.json"

    def lock(self) -> AbstractContextManager[Any]:
        """Return a context manager that locks the directory in rank 0.

        Entering raises RunError if it is locked.
        """
        busy = RunError(
            f"{self.path} is being trained by another process; wait for that process or stop it"
        )
        return locked(self.path / "training.lock", busy) if IS_MAIN else nullcontext()

    def begun_with(self) -> dict[str, Any] | None:
        """Return the recipe and digests of unfinished training; None without a checkpoint.

        Before the first checkpoint there is nothing to lose, so another recipe may start over.
        """
        if self.checkpoint() is None or not self._started.is_file():
            return None
        return dict(json.loads(self._started.read_text(encoding="utf-8")))

    def begin(self, key: Mapping[str, Any]) -> None:
        write_atomically(self._started, json.dumps(key, indent=1, ensure_ascii=False))

    def checkpoint(self) -> Path | None:
        """Return the last complete checkpoint: its trainer state, written last, can be read."""
        checkpoints = sorted(self.path.glob("checkpoint-*"), key=checkpoint_step, reverse=True)
        return next((path for path in checkpoints if _is_complete(path)), None)

    def drop_broken(self) -> None:
        """Remove incomplete checkpoints left by a crash, because rotation would count them."""
        for path in self.path.glob("checkpoint-*"):
            if not _is_complete(path):
                shutil.rmtree(path)

    def publish(self) -> None:
        """Move the finished policy to ``R/policies/NAME`` in one atomic step."""
        logs = self.path / "logs"
        if logs.is_dir():
            logs.rename(self.final / "logs")
        self.final.rename(self.policy)
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def checkpoint_step(path: Path | None) -> int:
    """Return the step of ``checkpoint-N``; 0 for None."""
    return int(path.name.rsplit("-", 1)[1]) if path else 0


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Inputs for training one policy, made from a recipe and a run, or by other code.

    Attributes:
        inputs: examples, or tasks for an online algorithm.
        key: recipe and digests that determine the result; part of training.json.
        max_steps: number of optimizer steps; None means the recipe's number, and 0 publishes the
            initial policy.
    """

    recipe: TrainingRecipe
    initial: InitialPolicy
    inputs: Sequence[TrainingExample] | Sequence[Task]
    directory: CheckpointDirectory
    key: Mapping[str, Any]
    run: Run | None = None
    environment: Environment | None = None
    validation: Validation | None = None
    max_steps: int | None = None
    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Report of `leret train`."""

    path: Path
    steps: int  # optimizer steps, including steps before an interruption
    total_steps: int  # optimizer steps since the base model
    rounds: int | None  # rounds of sampling and training; None for training on stored samples
    seconds: float  # wall clock of this call
    examples: int
    dropped: int  # number of examples that were skipped as too long
    loss_first: float | None
    loss_last: float | None
    already: bool = False  # the policy existed, and nothing was done
    resumed_from: int = 0  # step, or round, of the checkpoint at which this call resumed
    best_step: int | None = None  # optimizer step of the published weights, chosen by validation
    # validation score of the published weights minus the score before training
    validation_gain: float | None = None
    alarms: tuple[str, ...] = ()
    peak_gib: float | None = None  # peak memory of the GPU, or of the process
    completions_per_second: float | None = None  # mean over the log entries

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.steps < 10:
            notes.append(
                f"a short training (examples: {self.examples}, optimizer steps: {self.steps}); sample "
                "more questions or train longer"
            )
        if self.validation_gain is not None and self.validation_gain <= 0:
            notes.append(
                "no step had a better validation score than the policy before training; compare "
                "both with `leret eval`"
            )
        return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Content of training.json.

    Attributes:
        rounds: number of rounds, which are then the steps of the log; None for training on stored
            samples.
        preflight: relative error of TRL's log-probabilities
            (`leret.training.stored.trainer.check_logps`).
        log_history: metrics of each logged step, named as in TRL and in `leret.training.watch`.
        best_step: step of the published weights, chosen by validation; None without validation
            (last step published).
        validation: ids of validation tasks.
        weights: digest of the written weights.
    """

    name: str
    algorithm: str
    key: Mapping[str, Any]
    parent: str
    examples: int
    dropped: int = 0
    steps: int
    rounds: int | None = None
    total_steps: int
    seconds: float
    preflight: float | None = None
    versions: Mapping[str, str | None]
    log_history: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    best_step: int | None = None
    alarms: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    validation: Sequence[str] = field(default_factory=tuple)
    weights: str = ""

    @property
    def unit(self) -> str:
        """Return the unit of the steps in the log: ``step`` (an optimizer step) or ``round``."""
        return "step" if self.rounds is None else "round"

    def report(
        self, path: Path, seconds: float, *, already: bool = False, resumed_from: int = 0
    ) -> TrainReport:
        losses: list[float | None] = [
            float(e["loss"]) for e in self.log_history if "loss" in e
        ] or [None]
        scores = [score for _, score in self.validations]
        peaks = [float(e[PEAK]) for e in self.log_history if PEAK in e]
        rates = [float(e[RATE]) for e in self.log_history if RATE in e]
        best_step = self.best_step
        if best_step and self.rounds:  # the log's steps are rounds
            best_step = best_step * self.steps // self.rounds
        return TrainReport(
            path,
            steps=self.steps,
            total_steps=self.total_steps,
            rounds=self.rounds,
            seconds=seconds,
            examples=self.examples,
            dropped=self.dropped,
            loss_first=losses[0],
            loss_last=losses[-1],
            already=already,
            resumed_from=resumed_from,
            best_step=best_step,
            validation_gain=max(scores[1:]) - scores[0] if len(scores) > 1 else None,
            alarms=tuple(alarm["name"] for alarm in self.alarms),
            peak_gib=max(peaks, default=None),
            completions_per_second=fmean(rates) if rates else None,
        )

    @property
    def validations(self) -> list[tuple[int, float]]:
        """Return each validation's step and score."""
        validations = []
        for figures in self.log_history:
            for name, value in figures.items():
                if name.startswith("eval_") and name != "eval_unparsed":
                    validations.append((figures["step"], value))
        return validations

    def write(self, directory: Path, method: str, saved: SavedPolicy) -> None:
        losses = [figures for figures in self.log_history if "loss" in figures]
        last = losses[-1] if losses else {}
        values = {"record": self, "method": method, "saved": saved, "last": last}
        card = rendered(Path(__file__).with_name("card.md.j2"), values)
        write_atomically(directory / "README.md", card)
        value = {**asdict(self), "weights": policy_digest(directory)}
        write_atomically(
            directory / "training.json", json.dumps(value, indent=1, ensure_ascii=False)
        )
