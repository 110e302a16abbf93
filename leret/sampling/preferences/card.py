"""The card of a preference data set: what is in it, in the form that the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from leret.sampling.preferences.dataset import PreferenceReport


_BAR = 40
"""Characters of the longest bar."""


def card(report: PreferenceReport, run_name: str) -> str:
    """The README.md of the data set.

    Args:
        report: its counts.
        run_name: the run it was made in.
    """
    return f"""---
{yaml.safe_dump(_front_matter(report), sort_keys=False).rstrip()}
---

# Preferences of `{run_name}`

Search queries (or other completions of a DSPy program), preferred by what they retrieved. Made by leret: at every state
several prompts and samples were tried, and each was scored by the ranking that it led to. `prompt` is the zero-shot
prompt of the state, `chosen` and `rejected` are completions, `score_chosen` and `score_rejected` their rewards.

| | |
|---|---:|
{_table(_counts(report))}

Pairs by strategy `{report.strategy}`{_settings(report)}: {_MEANING[report.strategy]}.

## Rewards of the samples

```
{_histogram(report.histogram)}
```

## Pairs by hop

| hop | pairs |
|---:|---:|
{_table((str(step + 1), n) for step, n in sorted(report.pairs_per_step.items()))}

## Pairs by prompts

`0` is the zero-shot prompt, the others are the few-shot prompts of the bank.

| chosen over rejected | pairs |
|---|---:|
{_table(sorted(report.pairs_by_prompts.items()))}

## Failures

{_failures(report.failures)}
"""


_MEANING = {
    "adjacent": "each completion of a reward level over each one of the level just below",
    "best-worst": "each completion of the highest reward level over each one of the lowest",
    "all": "each completion over every one of a lower reward",
    "margin": "each completion over every one whose reward is lower by the margin or more",
}


def _front_matter(report: PreferenceReport) -> dict[str, Any]:
    return {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": report.path.name}]}],
        "tags": ["leret", "preference", "retrieval", "trl"],
        "size_categories": [_size(report.pairs)],
    }


def _counts(report: PreferenceReport) -> Iterable[tuple[str, object]]:
    states = report.states or 1
    yield "questions", report.questions
    yield "states", report.states
    yield "states with pairs", f"{report.states_with_pairs} ({report.states_with_pairs / states:.1%})"
    yield "states with no spread (all rewards equal)", f"{report.no_spread} ({report.no_spread / states:.1%})"
    yield "states without any reward", report.unscored
    yield "samples", report.samples
    yield "samples with a reward", report.rewarded
    yield "duplicates dropped", report.duplicates
    yield "mean reward", f"{report.mean_reward:.3f}"
    yield "pairs", report.pairs
    yield "mean margin", f"{report.mean_margin:.3f}"


def _settings(report: PreferenceReport) -> str:
    parts = [f"margin {report.margin:g}"] if report.strategy == "margin" else []
    parts += [f"at most {report.max_pairs} a state"] if report.max_pairs else []
    return f" ({', '.join(parts)})" if parts else ""


def _histogram(counts: list[int]) -> str:
    most = max(counts) or 1
    edges = [(i / len(counts), (i + 1) / len(counts)) for i in range(len(counts))]
    return "\n".join(
        f"{low:.1f}-{high:.1f} {n:>8} {'#' * round(_BAR * n / most)}".rstrip()
        for (low, high), n in zip(edges, counts, strict=True)
    )


def _failures(failures: Mapping[str, int]) -> str:
    if not failures:
        return "None: every sample has a reward."
    rows = _table(sorted(failures.items()))
    return f"Samples without a reward; they are in no pair.\n\n| kind | samples |\n|---|---:|\n{rows}"


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def _size(n: int) -> str:
    for bound, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M")):
        if n < bound:
            return name
    return "n>1M"
