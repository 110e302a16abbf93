"""Monitoring of training logs: rules that raise alarms, and a monitor that feeds trackers.

Log entries use TRL's names (`reward`, `kl`, `completions/mean_length` ..., and `val/ratio` for
PPO). leret adds `completions/unparsed` and `completions/distinct`, which are
fractions of the sampled completions, and to every log `PEAK` and `RATE`. For validation, leret adds
`eval_MEASURE` and `eval_unparsed`.
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from leret.config.training import TrainingRecipe
from leret.core.errors import MissingDependency, TrainingError
from leret.training.processes import IS_MAIN

_LOG = logging.getLogger("leret")

Log = Sequence[Mapping[str, Any]]

PEAK = "memory/peak_gib"
"""Peak memory so far (`peak_gib`)."""

RATE = "completions/per_second"
"""Completions sampled or trained on per second, without validation."""

PICKER = "pick/"
"""Prefix of the metrics of a picker that is trained together with a writer (`joint`)."""

ROW = 3
"""Number of consecutive logged values that must be beyond a limit to raise an alarm, so that one
noisy batch raises none. The starting value is the mean of the same number of values at the start of
a log."""

NOISE = 0.05
"""Minimum drop of a validation measure that counts: about the standard error of recall on 64
tasks."""

_SCORES = ("reward", "rewards/margins")
"""Metrics that training should increase: the reward, or the margin of chosen over rejected."""


def peak_gib() -> float:
    """Return the peak memory in GiB: of tensors on the GPU, or of this process if it uses none."""
    import torch

    if torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault at a step; ``message`` states the fault and what to try."""

    name: str
    step: int
    message: str


class Rule(NamedTuple):
    """A limit on one logged metric."""

    name: str
    keys: tuple[str, ...]  # names of the metric; a log entry has at most one of them
    beyond: Callable[[float, float], bool]  # takes the value and the starting value
    message: str  # the fault and what to try
    row: int = ROW  # consecutive values beyond the limit


RULES = (
    # Healthy training runs kept at least .79 of the reward; GRPO with faulty prompts had .6 after 20 rounds. With
    # mixer normalize_then_sum, the mean is 0 up to rounding errors.
    Rule(
        "reward",
        ("reward",),
        lambda value, start: start > 1e-6 and value < 2 / 3 * start,
        "the sample reward fell from {start:.3g} to {value:.3g}, so updates make the policy worse; "
        "lower learning_rate or raise the KL coefficient",
    ),
    # Healthy training runs of the demo keep at least 40% of their entropy, even at the highest useful learning rate.
    Rule(
        "entropy",
        ("entropy",),
        lambda value, start: value < 0.2 * start,
        "the policy's entropy fell from {start:.3g} to {value:.3g} nats per token, so completions "
        "hardly vary; lower learning_rate, raise the KL coefficient, or sample at a higher "
        "temperature",
    ),
    # The demo's best training runs with groups of four end at .82.
    Rule(
        "zero_spread",
        ("frac_reward_zero_std",),
        lambda value, start: value > 0.9,
        "{value:.0%} of the groups have the same reward for all samples and teach nothing; sample "
        "more completions per state or at a higher temperature, or choose a reward with more "
        "levels",
    ),
    Rule(
        "duplicates",
        ("completions/distinct",),
        lambda value, start: value < 0.2,  # 2 distinct completions in a group of 8 give .25
        "only {value:.0%} of a group's completions are distinct; "
        "raise the temperature or top_p, or lower learning_rate",
    ),
    Rule(
        "unparsed",
        ("completions/unparsed", "eval_unparsed"),
        lambda value, start: value > 0.2,
        "{value:.0%} of the completions are not in the program's format; raise max_tokens if "
        "completions are truncated, start from an sft policy, or lower learning_rate",
    ),
    Rule(
        "length",
        ("completions/mean_length",),
        lambda value, start: not 0.5 * start <= value <= 2 * start,
        "the mean completion length changed from {start:.3g} to {value:.3g} tokens; "
        "inspect recent completions, add the reward `length`, or raise the KL coefficient",
    ),
    Rule(
        "length_ratio",
        ("completions/length_ratio",),
        lambda value, start: not 0.5 <= value <= 2,
        "the completions have {value:.3g} times as many words as the references; lower "
        "learning_rate, raise beta, or add the reward `length`",
    ),
    Rule(
        "distinct_1",
        ("completions/distinct_1",),
        lambda value, start: value < start / 3,
        "the share of distinct words in the completions fell from {start:.3g} to {value:.3g}, so "
        "they repeat the same words; lower learning_rate or raise beta",
    ),
    # Training runs of the demo that still gain recall reach .75 (GRPO) and 1.3 (PPO).
    Rule(
        "kl",
        ("kl",),
        lambda value, start: value > 2,
        "the policy's KL from the initial policy is {value:.3g} nats per token; "
        "raise the KL coefficient, or lower learning_rate",
    ),
    # TRL's PPO guide: a ratio near 1 is healthy, and a ratio of 2 or .1 means that updates are too large.
    Rule(
        "ratio",
        ("val/ratio",),
        lambda value, start: not 0.5 <= value <= 2,
        "the ratio of the updated policy's to the sampling policy's probabilities is {value:.3g} "
        "instead of about 1; lower learning_rate or take fewer passes over each batch of samples",
    ),
    Rule(
        "ratio",
        ("clip_ratio/region_mean",),
        lambda value, start: value > 0.4,
        "the loss is clipped at {value:.0%} of the tokens, so the policy changes too much between "
        "rounds; lower learning_rate or take fewer passes over each batch of samples",
    ),
    # Equal weights in float32 differ by at most 3e-5. SmolLM2-135M sampled in float32 and trained in bfloat16 differs
    # by .03, which gives completions of 24 tokens ratios of .5 to 1.4 before any update. No update changes it, so one
    # round tells.
    Rule(
        "sampler",
        ("sampling/sampling_logp_difference/mean",),
        lambda value, start: value > 0.02,
        "the sampler and the trainer differ by {value:.2g} nats per token for the same weights, "
        "so ratios start far from 1; use one dtype and one chat template for both, or set "
        "importance_clip",
        row=1,
    ),
    # A server that is wrong about few tokens hardly changes the mean: .5 nats at 1% of the tokens is a mean of .005.
    Rule(
        "sampler",
        ("sampling/sampling_logp_difference/outliers",),
        lambda value, start: value > 0.005,
        "the sampler and the trainer differ by more than 0.3 nats at {value:.1%} of the tokens for "
        "the same weights; check that the server samples these weights without penalties, "
        "grammars or a prefix cache of older weights, or set importance_clip",
        row=1,
    ),
)


def alarms(log: Log, measure: str = "recall") -> list[Alarm]:
    """Return the alarms that the last log entry raises; ``measure`` is the validation measure."""
    if not log:
        return []
    step = int(log[-1]["step"])
    messages = _validation(log, f"eval_{measure}")
    prefixes = [""]
    if any(name.startswith(PICKER) for name in log[-1]):
        prefixes.append(PICKER)
    for prefix in prefixes:
        part = [_with_prefix(figures, prefix) for figures in log]
        for rule in RULES:
            message = _check(rule, part)
            if message is not None:
                messages[f"{prefix}{rule.name}"] = f"{prefix}{message}"
    return [Alarm(name, step, message) for name, message in messages.items()]


def _with_prefix(figures: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in figures.items()
        if name.startswith(prefix)
    }


def first_alarms(log: Log, measure: str = "recall") -> list[Alarm]:
    """Return each alarm in a log once, at the first step that raised it."""
    first: dict[str, Alarm] = {}
    for n in range(1, len(log) + 1):
        for alarm in alarms(log[:n], measure):
            first.setdefault(alarm.name, alarm)
    return list(first.values())


def best_step(log: Log, measure: str = "recall") -> int | None:
    """Return the step after 0 with the best validation score (the earliest if tied).

    Return None without validation.
    """
    key = f"eval_{measure}"
    validated = [figures for figures in log if key in figures and figures["step"] > 0]
    if not validated:
        return None
    best = max(validated, key=lambda figures: figures[key])
    return int(best["step"])


def _check(rule: Rule, log: Log) -> str | None:
    latest = log[-1]
    key = next((key for key in rule.keys if latest.get(key) is not None), None)
    if key is None:
        return None
    if key == "entropy" and ("alpha" in latest or "reward" not in latest):
        return None  # imitation and a decaying temperature lower the entropy on purpose
    start = fmean(_first_values(log, key, rule.row))
    last = _first_values(reversed(log), key, rule.row)
    if len(last) < rule.row or not all(rule.beyond(value, start) for value in last):
        return None
    return rule.message.format(value=last[0], start=start)


def _first_values(log: Iterable[Mapping[str, Any]], key: str, n: int) -> list[float]:
    values = (float(figures[key]) for figures in log if figures.get(key) is not None)
    return list(islice(values, n))


def _validation(log: Log, key: str) -> dict[str, str]:
    """Return alarms if the last two scores are far below the first, or fell while rewards rose."""
    if key not in log[-1]:
        return {}
    indices = [i for i, figures in enumerate(log) if key in figures]
    values = [float(log[i][key]) for i in indices]
    first, best, last = values[0], max(values), values[-1]
    recent = max(values[-2:])
    if len(values) < 3 or recent > best - NOISE:
        return {}
    messages = {}
    name = key.removeprefix("eval_")
    top = indices[values.index(best)]
    before = _scores(log[: top + 1])[-ROW:]
    after = _scores(log[top + 1 :])[-ROW:]
    if before and after and fmean(after) > fmean(before):
        messages["overfitting"] = (
            f"validation {name} fell from {best:.3g} to {last:.3g} while the reward rose, so the "
            "policy exploits the reward; inspect recent completions, fix the reward, or raise the "
            "KL coefficient"
        )
    if recent < 0.8 * first:
        messages["validation"] = (
            f"validation {name} is {last:.3g}, but was {first:.3g} before training; lower "
            "learning_rate, or raise beta or the KL coefficient"
        )
    return messages


def _scores(log: Log) -> list[float]:
    scores = []
    for figures in log:
        scores += [float(figures[name]) for name in _SCORES if figures.get(name) is not None]
    return scores


@dataclass
class Monitor:
    """Reads each new log entry: refuses values that are not finite, raises alarms, feeds trackers."""

    name: str
    measure: str = "recall"
    on_alarm: Literal["warn", "stop"] = "warn"
    event: Callable[..., None] | None = None  # writes a run event with a kind and facts
    unit: str = "step"  # what a step of the log is: step or round
    trackers: Sequence[Any] = ()  # started accelerate trackers
    alarm: str | None = None  # message of the alarm that stops training
    _raised: set[str] = field(default_factory=set)

    def begin(self, log: Log) -> None:
        """Read a checkpoint's log.

        Raise TrainingError if it has an alarm and ``on_alarm`` is stop.
        """
        before = first_alarms(log, self.measure)
        self._raised = {alarm.name for alarm in before}
        if before and self.on_alarm == "stop":
            self.alarm = f"{self.unit} {before[0].step}: {before[0].message}"
            self.check()

    def see(self, log: Log) -> bool:
        """Read the last log entry.

        Return True if the driver must save a checkpoint, stop and call `check`.
        """
        from transformers.integrations import rewrite_logs

        figures = log[-1]
        for name in ("loss", "grad_norm"):
            value = figures.get(name)
            if value is not None and not math.isfinite(float(value)):
                raise TrainingError(
                    f"the {name} is {value} at {self.unit} {figures['step']}; "
                    "lower learning_rate or max_grad_norm, or check the training examples"
                ).failed()
        values = {}
        for name, value in figures.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                values[name] = float(value)
        for tracker in self.trackers:
            tracker.log(rewrite_logs(values), step=int(figures["step"]))  # train/loss, eval/recall
        for alarm in alarms(log, self.measure):
            if alarm.name not in self._raised:
                self._raised.add(alarm.name)
                self._report(alarm)
        return self.alarm is not None

    def _report(self, alarm: Alarm) -> None:
        text = f"{self.unit} {alarm.step}: {alarm.message}"
        if IS_MAIN:
            _LOG.warning("%s, %s", self.name, text)
        if self.event is not None:
            self.event(
                "alarm",
                policy=self.name,
                alarm=alarm.name,
                step=alarm.step,
                message=alarm.message,
            )
        if self.on_alarm == "stop":
            self.alarm = self.alarm or text

    def check(self) -> None:
        if self.alarm is not None:
            raise TrainingError(
                f"stopped at an alarm: {self.alarm}. Resume from the checkpoint with --set "
                "on_alarm=warn; to change other keys, choose another `name`"
            ).failed()


@contextmanager
def monitored(
    recipe: TrainingRecipe, directory: Path, event: Callable[..., None] | None = None
) -> Iterator[Monitor]:
    """Yield a monitor with the trackers in ``report_to``; close the trackers when the block ends.

    TensorBoard and W&B write to ``directory/logs``. Only the main process has trackers and writes
    events.
    """
    trackers: list[Any] = []
    try:
        for name in recipe.report_to if IS_MAIN else ():
            trackers.append(_tracker(name, recipe, directory / "logs"))
        yield Monitor(
            recipe.policy_name,
            recipe.metric_for_best_model,
            recipe.on_alarm,
            event if IS_MAIN else None,
            recipe.progress_unit,
            trackers,
        )
    finally:
        for tracker in trackers:
            tracker.finish()


def check_trackers(packages: Sequence[str]) -> None:
    """Raise MissingDependency for a tracker that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingDependency(package, package)


def _tracker(name: str, recipe: TrainingRecipe, logs: Path) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # required by accelerate's logger
    kind = LOGGER_TYPE_TO_CLASS[name]
    run_name = recipe.run_name or recipe.policy_name
    logs.mkdir(parents=True, exist_ok=True)  # otherwise W&B writes to another directory
    if name == "tensorboard":
        tracker = kind(run_name, os.environ.get("TENSORBOARD_LOGGING_DIR", str(logs)))
    else:
        keys = {"resume": "allow"}
        if name != "trackio":
            keys = {"dir": os.environ.get("WANDB_DIR", str(logs))}
        config = recipe.model_dump(mode="json")
        tracker = kind(recipe.project, name=run_name, config=config, **keys)
    tracker.start()
    return tracker
