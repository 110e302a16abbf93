"""Counts of a preference dataset, and its dataset card for the Hugging Face Hub."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from leret.core.files import rendered

Strategy = Literal["adjacent", "best-worst", "all", "margin"]

_BAR = 40
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
_MEANING = {
    "adjacent": "each completion is preferred to each completion with the next lower reward",
    "best-worst": "each completion with the highest reward is preferred to each completion with the lowest",
    "all": "each completion is preferred to every completion with a lower reward",
    "margin": "each completion is preferred to every completion with a reward lower by at least the margin",
}


@dataclass
class PreferenceReport:
    """Counts of the dataset.

    Attributes:
        cut: completions that ``max_tokens`` cut.
        no_spread: states where all rewards are equal; ``unscored``: states without rewards.
        unparsed_reward: reward of unparsed completions in pairs; None excludes unparsed
            completions.
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
    cut: int = 0
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
    low, high = report.reward_range
    n_bars = len(report.histogram)
    most = max(report.histogram) or 1
    edges = [low + i * (high - low) / n_bars for i in range(n_bars + 1)]
    marks = ["#" * round(_BAR * n / most) for n in report.histogram]
    settings = []
    if report.strategy == "margin":
        settings.append(f"margin {report.margin:g}")
    if report.max_pairs:
        settings.append(f"at most {report.max_pairs} per state")
    priced = ""
    if report.unparsed_reward is not None:
        reward = f"{report.unparsed_reward:g}"
        priced = f", except unparsed completions (`parse`), which get reward {reward}"
    values = {
        "report": report,
        "run": run_name,
        "size": next((name for bound, name in _SIZES if report.pairs < bound), "n>1M"),
        "share": lambda n: f"{n / (report.states or 1):.1%}",
        "settings": f" ({', '.join(settings)})" if settings else "",
        "meaning": _MEANING[report.strategy],
        "bars": list(zip(edges, edges[1:], report.histogram, marks, strict=False)),
        "priced": priced,
    }
    return rendered(Path(__file__).with_name("card.md.j2"), values)
