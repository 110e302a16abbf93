"""Counts of a preference dataset, and its dataset card for the Hugging Face Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from leret.core import yaml

Strategy = Literal["adjacent", "best-worst", "all", "margin"]

_BAR = 40
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
_MEANING = {
    "adjacent": "each completion is preferred to each completion with the next lower reward",
    "best-worst": "each completion with the highest reward is preferred to each completion with the lowest",
    "all": "each completion is preferred to every completion with a lower reward",
    "margin": "each completion is preferred to every completion with a reward lower by at least the margin",
}
_CARD = """---
{hub}
---

# Preferences of `{run}`

Pairs of search queries (or other completions of a DSPy program), ranked by reward. Made by leret: at each state,
completions were sampled with several prompts and scored by the retrieved ranking. `prompt` is the zero-shot prompt of
the state, `chosen` and `rejected` are completions, `score_chosen` and `score_rejected` are rewards.

| | |
|---|---:|
{facts}

The pairs were built with strategy {rule}.

## Rewards of the samples

```
{histogram}
```

## Pairs by step

`step` is the number of LM calls before the completion.

| step | pairs |
|---:|---:|
{steps}

## Pairs by prompts

`0` is the zero-shot prompt; the other numbers are few-shot prompts of the prompt bank.

| chosen over rejected | pairs |
|---|---:|
{prompts}

## Failures

{failures}
"""
_FAILURES = "Samples without a reward are in no pair{priced}.\n\n| kind | samples |\n|---|---:|\n"


@dataclass
class PreferenceReport:
    """Counts of the dataset.

    Attributes:
        no_spread: states where all rewards are equal; ``unscored``: states without rewards.
        unparsed_reward: reward of unparsed completions in pairs; None excludes unparsed completions.
        histogram: number of samples per tenth of ``reward_range``, which includes 0 to 1.
    """

    path: Path
    strategy: Strategy
    margin: float
    max_pairs: int | None
    unparsed_reward: float | None = None
    pairs: int = 0
    questions: int = 0
    states: int = 0
    states_with_pairs: int = 0
    no_spread: int = 0
    unscored: int = 0
    samples: int = 0
    rewarded: int = 0
    duplicates: int = 0
    reward_sum: float = 0.0
    margin_sum: float = 0.0
    reward_range: tuple[float, float] = (0.0, 1.0)
    histogram: list[int] = field(default_factory=lambda: [0] * 10)
    pairs_per_step: Counter[int] = field(default_factory=Counter)
    pairs_by_prompts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def mean_reward(self) -> float:
        return self.reward_sum / self.rewarded if self.rewarded else 0.0

    @property
    def mean_margin(self) -> float:
        return self.margin_sum / self.pairs if self.pairs else 0.0


def card(report: PreferenceReport, run_name: str) -> str:
    """Return the dataset's README.md."""
    n_states = report.states or 1
    facts = {
        "questions": report.questions,
        "states": report.states,
        "states with pairs": f"{report.states_with_pairs} ({report.states_with_pairs / n_states:.1%})",
        "states with no spread (all rewards equal)": f"{report.no_spread} ({report.no_spread / n_states:.1%})",
        "states without any reward": report.unscored,
        "samples": report.samples,
        "samples with a reward": report.rewarded,
        "duplicates dropped": report.duplicates,
        "mean reward": f"{report.mean_reward:.3f}",
        "pairs": report.pairs,
        "mean margin": f"{report.mean_margin:.3f}",
    }
    hub = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": report.path.name}]}],
        "tags": ["leret", "preference", "retrieval", "trl"],
        "size_categories": [next((name for bound, name in _SIZES if report.pairs < bound), "n>1M")],
    }
    price = report.unparsed_reward
    priced = "" if price is None else f", except unparsed completions (`parse`), which get reward {price:g}"
    return _CARD.format(
        hub=yaml.dump(hub).rstrip(),
        run=run_name,
        facts=_table(facts.items()),
        rule=f"`{report.strategy}`{_settings(report)}: {_MEANING[report.strategy]}",
        histogram=_histogram(report),
        steps=_table((str(step), n) for step, n in sorted(report.pairs_per_step.items())),
        prompts=_table(sorted(report.pairs_by_prompts.items())),
        failures=_FAILURES.format(priced=priced) + _table(sorted(report.failures.items()))
        if report.failures
        else "None: every sample has a reward.",
    )


def _settings(report: PreferenceReport) -> str:
    parts = [f"margin {report.margin:g}"] if report.strategy == "margin" else []
    parts += [f"at most {report.max_pairs} per state"] if report.max_pairs else []
    return f" ({', '.join(parts)})" if parts else ""


def _histogram(report: PreferenceReport) -> str:
    (low, high), n_bars, most = report.reward_range, len(report.histogram), max(report.histogram) or 1
    edges = [low + i * (high - low) / n_bars for i in range(n_bars + 1)]
    return "\n".join(
        f"{edges[i]:.1f}-{edges[i + 1]:.1f} {n:>8} {'#' * round(_BAR * n / most)}".rstrip()
        for i, n in enumerate(report.histogram)
    )


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows)
