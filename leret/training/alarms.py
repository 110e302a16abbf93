"""What a training's log shows when it goes wrong, and what to try.

A log is a list of entries, one a logged step, with the names of TRL's trainers: `reward`, `frac_reward_zero_std`,
`entropy`, `kl`, `completions/mean_length`, `clip_ratio/region_mean`, and of its PPO: `objective/kl`, `val/ratio`,
`policy/entropy`. leret adds `completions/unparsed` and `completions/distinct`, shares of the sampled completions,
and of a validation `eval_MEASURE` and `eval_unparsed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

Log = Sequence[Mapping[str, Any]]

ROW = 3
"""Logged values in a row that must be beyond a limit, so that one batch's noise raises no alarm; and values whose mean
is where a training started."""

NOISE = 0.05
"""A fall of a validation's measure that counts: about the standard error of the recall of 64 tasks."""

_REWARDS = ("reward", "objective/rlhf_reward")
_SCORES = (*_REWARDS, "rewards/margins")
"""What a training raises: the reward, or the margin between chosen and rejected."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is wrong at a step: ``message`` says what, and what to try."""

    name: str
    step: int
    message: str


class Rule(NamedTuple):
    """A limit on one logged figure."""

    name: str
    keys: tuple[str, ...]  # of the figure; an entry of the log has one of them
    beyond: Callable[[float, float], bool]  # of a value, and of that at the start
    message: str  # what is wrong, and what to try


RULES = (
    # Healthy trainings keep .79 of it in their noise; GRPO that a fault kept from its prompts had .6 after 20 rounds.
    Rule(
        "reward",
        _REWARDS,
        lambda value, start: start > 0 and value < 2 / 3 * start,
        "the reward of the samples fell from {start:.3g} to {value:.3g}: the updates make the policy worse; "
        "lower learning_rate, or raise the KL coefficient",
    ),
    # The demo's healthy trainings keep 40 % and more of it, also at the highest rate that still gains recall.
    Rule(
        "entropy",
        ("entropy", "policy/entropy"),
        lambda value, start: value < 0.2 * start,
        "the policy's entropy fell from {start:.3g} to {value:.3g} nats a token: it writes one completion everywhere; "
        "lower learning_rate, raise the KL coefficient, or sample at a higher temperature",
    ),
    # Of groups of four, the demo's best trainings end at .82.
    Rule(
        "zero_spread",
        ("frac_reward_zero_std",),
        lambda value, start: value > 0.9,
        "{value:.0%} of the groups have one reward for all of their samples, and teach nothing; "
        "sample more completions a state, at a higher temperature, or choose a reward with more levels",
    ),
    Rule(
        "duplicates",
        ("completions/distinct",),
        lambda value, start: value < 0.2,  # 2 different completions in a group of 8 are at .25
        "of the completions of a group, {value:.0%} are different ones; "
        "sample at a higher temperature or with a larger top_p, or lower learning_rate",
    ),
    Rule(
        "unparsed",
        ("completions/unparsed", "eval_unparsed"),
        lambda value, start: value > 0.2,
        "{value:.0%} of the completions are not in the program's format; "
        "raise max_tokens where they are cut off, start from an sft policy, or lower learning_rate",
    ),
    Rule(
        "length",
        ("completions/mean_length",),
        lambda value, start: not 0.5 * start <= value <= 2 * start,
        "the completions' mean length went from {start:.3g} to {value:.3g} tokens; "
        "add the reward `length`, raise the KL coefficient, or look at what the policy writes now",
    ),
    # Trainings that still gain recall stand at .75 (GRPO) and 1.3 (PPO) on the demo.
    Rule(
        "kl",
        ("kl",),
        lambda value, start: value > 2,
        "the policy is {value:.3g} nats a token away from where it started; "
        "raise the KL coefficient, or lower learning_rate",
    ),
    # A sequence's KL, of completions of some ten tokens at least; limits of TRL's PPO are of the same order.
    Rule(
        "kl",
        ("objective/kl",),
        lambda value, start: value > 20,
        "the policy is {value:.3g} nats a completion away from where it started; "
        "raise the KL coefficient, or lower learning_rate",
    ),
    # TRL on its PPO: near 1 when all is well; 2 or .1 means that the updates are too large.
    Rule(
        "ratio",
        ("val/ratio",),
        lambda value, start: not 0.5 <= value <= 2,
        "the updated policy gives the samples {value:.3g} times the probability they were drawn with; "
        "lower learning_rate, or take fewer epochs over a batch of samples",
    ),
    Rule(
        "ratio",
        ("clip_ratio/region_mean",),
        lambda value, start: value > 0.4,
        "the loss is clipped at {value:.0%} of the tokens: the policy moves too far between two samplings; "
        "lower learning_rate, or take fewer epochs over a batch of samples",
    ),
)


def alarms(log: Log, measure: str = "recall") -> list[Alarm]:
    """What is wrong as of the last entry; ``measure`` is the one of the validation."""
    if not log:
        return []
    step = int(log[-1]["step"])
    found = {rule.name: said for rule in RULES if (said := _check(rule, log)) is not None}
    found |= _validation(log, f"eval_{measure}")
    return [Alarm(name, step, message) for name, message in found.items()]


def first_alarms(log: Log, measure: str = "recall") -> list[Alarm]:
    """Every alarm of a training, at the step where it was first raised."""
    first: dict[str, Alarm] = {}
    for n in range(1, len(log) + 1):
        for alarm in alarms(log[:n], measure):
            first.setdefault(alarm.name, alarm)
    return list(first.values())


def best_step(log: Log, measure: str = "recall") -> int | None:
    """The step of the best validation, the earliest of equal ones; None without one. Step 0 is the initial policy's."""
    validated = [entry for entry in log if f"eval_{measure}" in entry and entry["step"] > 0]
    return int(max(validated, key=lambda entry: entry[f"eval_{measure}"])["step"]) if validated else None


def _check(rule: Rule, log: Log) -> str | None:
    key = next((key for key in rule.keys if log[-1].get(key) is not None), None)
    if key is None or (key == "entropy" and ("alpha" in log[-1] or not any(name in log[-1] for name in _REWARDS))):
        return None  # imitating lowers the entropy, as it should, and so does a falling temperature
    last, first = (
        [float(entry[key]) for entry in islice((e for e in entries if e.get(key) is not None), ROW)]
        for entries in (reversed(log), log)
    )
    start = fmean(first)
    if len(last) < ROW or not all(rule.beyond(value, start) for value in last):
        return None
    return rule.message.format(value=last[0], start=start)


def _validation(log: Log, key: str) -> dict[str, str]:
    """A validation that fell, twice in a row: below what it was at first, or while the reward still rises."""
    if key not in log[-1]:
        return {}
    places = [place for place, entry in enumerate(log) if key in entry]
    values = [float(log[place][key]) for place in places]
    first, best, last = values[0], max(values), values[-1]
    if len(values) < 3 or max(values[-2:]) > best - NOISE:
        return {}
    found = {}
    name = key.removeprefix("eval_")
    top = places[values.index(best)]
    before, after = _scores(log[: top + 1])[-ROW:], _scores(log[top + 1 :])[-ROW:]
    if before and after and fmean(after) > fmean(before):
        found["overfitting"] = (
            f"validation {name} fell from {best:.3g} to {last:.3g} while the reward rose: the policy learns what the "
            "reward does not mean; look at what it writes, mend the reward, or raise the KL coefficient"
        )
    if max(values[-2:]) < 0.8 * first:
        found["validation"] = (
            f"validation {name} is {last:.3g}, and was {first:.3g} before the training; lower learning_rate, or raise "
            "beta or the KL coefficient"
        )
    return found


def _scores(log: Log) -> list[float]:
    return [float(entry[name]) for entry in log for name in _SCORES if entry.get(name) is not None]
