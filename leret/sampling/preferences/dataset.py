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
from leret.core.files import write_atomically
from leret.core.runs import Run
from leret.core.types import Sample
from leret.sampling.preferences.card import card
from leret.sampling.preferences.pairs import Pair, Strategy, distinct, make_pairs
from leret.sampling.rollouts.selection import reward_levels
from leret.sampling.store.schema import StateSamples
from leret.sampling.store.store import Store

N_BINS = 10
"""Bars of the reward histogram, over [0, 1]."""

_ROWS_A_GROUP = 5000

COLUMNS = (
    "prompt", "chosen", "rejected", "score_chosen", "score_rejected", "question_id", "state_id", "step", "predictor",
    "chosen_id", "rejected_id", "chosen_prompt", "rejected_prompt",
)  # fmt: skip


@dataclass
class PreferenceReport:
    """What went into the data set.

    Attributes:
        states: states that were sampled; ``no_spread`` of them have completions of one reward alone, ``unscored``
            have none with a reward.
        duplicates: completions dropped since another one at the state is the same.
        histogram: samples by reward, ten bars over [0, 1], the last one with 1 in it.
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
    histogram: list[int] = field(default_factory=lambda: [0] * N_BINS)
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

    Args:
        run: that was sampled.
        strategy: see `leret.sampling.preferences.pairs.make_pairs`.
        margin: least difference of rewards, of strategy ``margin``.
        max_pairs: pairs a state at most, the widest margins first.
        policy_digest: samples of this policy alone; None takes the policy that the run sampled last.

    Raises:
        RunError: nothing was sampled, or the directory cannot be written.
    """
    manifest = run.manifest()
    policy_digest = policy_digest or manifest.get("digests", {}).get("policy")
    report = PreferenceReport(run.preferences / "train.parquet", strategy, margin, max_pairs)
    with Store(run.store, read_only=True) as store, run.writing():
        run.preferences.mkdir(parents=True, exist_ok=True)
        _write(report, _rows(store, policy_digest, report))
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
        different = _count(group, report)
        pairs = make_pairs(different, report.strategy, report.margin, report.max_pairs)
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
    rewarded = [sample for sample in group.samples if sample.reward is not None]
    different = distinct(rewarded)
    report.states += 1
    report.samples += len(group.samples)
    report.rewarded += len(rewarded)
    report.duplicates += len(rewarded) - len(different)
    report.unscored += not rewarded
    report.no_spread += len(reward_levels(rewarded)) == 1
    report.failures.update(sample.failure.kind for sample in group.samples if sample.failure is not None)
    for sample in rewarded:
        reward = sample.reward or 0.0
        report.reward_sum += reward
        report.histogram[min(int(reward * N_BINS), N_BINS - 1)] += 1
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


def _write(report: PreferenceReport, rows: Iterator[dict[str, Any]]) -> None:
    """Write beside the old file, then put the new one in its place."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = [messages] * 3 + [pa.float64()] * 2 + [pa.string()] * 2 + [pa.int64()] + [pa.string()] * 5
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    partial = report.path.with_name(f".{report.path.name}.partial")
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            batch: list[dict[str, Any]] = []
            for row in rows:
                batch.append(row)
                if len(batch) == _ROWS_A_GROUP:
                    writer.write_table(pa.Table.from_pylist(batch, schema))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, schema))
        partial.replace(report.path)
    finally:
        partial.unlink(missing_ok=True)
