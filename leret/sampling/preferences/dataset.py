"""The preference data set: pairs of the store, as a Hugging Face data set in Parquet.

Conversational columns as TRL reads them (``prompt``, ``chosen``, ``rejected``), both rewards, and where each pair
comes from. The prompt is the zero-shot one whatever prompt of the bank a completion came from. Same store, same
settings: same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leret.core.errors import RunError
from leret.core.files import atomic_file, write_atomically
from leret.core.runs import Run
from leret.core.types import Sample
from leret.sampling.preferences.card import card
from leret.sampling.preferences.pairs import Pair, Strategy, distinct, make_pairs
from leret.sampling.rollouts.selection import reward_levels
from leret.sampling.store.export import write_parquet
from leret.sampling.store.schema import StateSamples
from leret.sampling.store.store import Store

COLUMNS = {
    "prompt": "messages", "chosen": "messages", "rejected": "messages", "score_chosen": "float64",
    "score_rejected": "float64", "question_id": "string", "state_id": "string", "step": "int64", "predictor": "string",
    "chosen_id": "string", "rejected_id": "string", "chosen_prompt": "string", "rejected_prompt": "string",
}  # fmt: skip
"""With their types, as in `leret.sampling.store.export`."""


@dataclass
class PreferenceReport:
    """What went into the data set.

    Attributes:
        states: states that were sampled; ``no_spread`` of them have completions of one reward alone, ``unscored``
            have none with a reward.
        duplicates: completions dropped since another one at the state is the same.
        reward_range: least and greatest reward, and 0 to 1 at least.
        histogram: samples by reward, in tenths of that range.
        pairs_per_step: pairs by the number of LM calls before (0 at the first hop).
        failures: samples without a reward, by kind.
    """

    path: Path
    strategy: Strategy
    margin: float
    max_pairs: int | None
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
        """Of the samples that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else 0.0

    @property
    def mean_margin(self) -> float:
        """Mean difference of the rewards of a pair."""
        return self.margin_sum / self.pairs if self.pairs else 0.0


def build_preferences(
    run: Run,
    strategy: Strategy = "adjacent",
    margin: float = 0.0,
    max_pairs: int | None = None,
    policy_digest: str | None = None,
) -> PreferenceReport:
    """Make R/preferences from the store's finished questions, replacing what was there.

    The samples are of one policy, by default the one that the run sampled last; for the other arguments see
    `leret.sampling.preferences.pairs.make_pairs`.

    Raises:
        RunError: nothing was sampled, or the directory cannot be written.
    """
    policy_digest = policy_digest or run.manifest().get("digests", {}).get("policy")
    report = PreferenceReport(run.preferences / "train.parquet", strategy, margin, max_pairs)
    with Store(run.store, read_only=True) as store, run.writing():
        low, high = store.reward_range()
        report.reward_range = min(0.0, low), max(1.0, high)
        with atomic_file(report.path, "wb") as file:
            write_parquet(_rows(store, policy_digest, report), file, COLUMNS)
        write_atomically(run.preferences / "README.md", card(report, run.path.name))
    run.update(preferences={"strategy": strategy, "margin": margin, "max_pairs": max_pairs, "pairs": report.pairs})
    run.event("pairs", "built", strategy=strategy, pairs=report.pairs, states=report.states, no_spread=report.no_spread)
    return report


def _rows(store: Store, policy_digest: str | None, report: PreferenceReport) -> Iterator[dict[str, Any]]:
    last: tuple[str, str] | None = None
    for group in store.finished(policy_digest):
        question = (group.policy_digest, group.state.question_id)
        report.questions += question != last  # those of one question stand together
        last = question
        pairs = make_pairs(_count(group, report), report.strategy, report.margin, report.max_pairs)
        report.states_with_pairs += bool(pairs)
        for pair in pairs:
            yield _row(group, pair, report)
    if not report.samples:
        raise RunError(
            f"{store.path} holds no question that is sampled to its end; "
            f"run `leret sample RECIPE --run {store.path.parent}` first"
        )


def _count(group: StateSamples, report: PreferenceReport) -> list[Sample]:
    """Note one state's samples; returns the distinct ones."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    different = distinct(group.samples)
    report.states += 1
    report.samples += len(group.samples)
    report.rewarded += len(rewards)
    report.duplicates += len(rewards) - len(different)
    report.unscored += not rewards
    report.no_spread += len(reward_levels(group.samples)) == 1
    report.failures.update(sample.failure.kind for sample in group.samples if sample.failure is not None)
    report.reward_sum += sum(rewards)
    (low, high), n_bars = report.reward_range, len(report.histogram)
    for reward in rewards:
        report.histogram[min(int((reward - low) / (high - low) * n_bars), n_bars - 1)] += 1
    return different


def _row(group: StateSamples, pair: Pair, report: PreferenceReport) -> dict[str, Any]:
    chosen, rejected = pair
    report.pairs += 1
    report.margin_sum += (chosen.reward or 0.0) - (rejected.reward or 0.0)
    report.pairs_per_step[group.state.step] += 1
    report.pairs_by_prompts[f"{chosen.prompt} over {rejected.prompt}"] += 1
    values = (
        [dict(message) for message in group.state.messages],
        [{"role": "assistant", "content": chosen.completion}],
        [{"role": "assistant", "content": rejected.completion}],
        chosen.reward, rejected.reward,
        group.state.question_id, group.state.id, group.state.step, group.state.predictor,
        chosen.id, rejected.id, chosen.prompt, rejected.prompt,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))
