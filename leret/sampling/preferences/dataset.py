"""Training data from a store: preference pairs in Parquet (with TRL's columns), and targets for imitation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any, Literal

from leret.config.sampling import RewardSettings, SamplingSettings
from leret.core.errors import RunError
from leret.core.files import atomic_file, write_atomically
from leret.core.runs import Run
from leret.core.types import Sample, digest
from leret.rollouts.credit import with_unparsed_reward
from leret.rollouts.selection import reward_levels
from leret.sampling.preferences.report import PreferenceReport, Strategy, card
from leret.sampling.store.export import message_column, write_parquet
from leret.sampling.store.store import StateSamples, Store

COLUMNS = {
    "prompt": "messages", "chosen": "messages", "rejected": "messages", "score_chosen": "float64",
    "score_rejected": "float64", "question_id": "string", "state_id": "string", "step": "int64", "predictor": "string",
    "chosen_id": "string", "rejected_id": "string", "chosen_prompt": "string", "rejected_prompt": "string",
    "chosen_finish_reason": "string", "rejected_finish_reason": "string", "chosen_token_ids": "ints",
    "rejected_token_ids": "ints",
}  # fmt: skip


Pair = tuple[Sample, Sample]
"""(chosen, rejected)."""


def build_preferences(
    run: Run,
    strategy: Strategy = "adjacent",
    margin: float = 0.0,
    max_pairs: int | None = None,
    policy_digest: str | None = None,
) -> PreferenceReport:
    """Rebuild R/preferences from questions finished by a policy (default: the run's); RunError if there are none."""
    policy_digest = policy_digest or run.manifest.policy_digest
    report = PreferenceReport(run.preferences / "train.parquet", strategy, margin, max_pairs)
    report.unparsed_reward = unparsed_reward(run)
    with Store(run.store, read_only=True) as store, run.writing():
        low, high = store.reward_range()
        report.reward_range = min(0.0, low), max(1.0, high)
        with atomic_file(report.path, "wb") as file:
            prompt = message_column(store.path)
            write_parquet(_rows(store, policy_digest, report), file, {**COLUMNS, "prompt": prompt})
        write_atomically(run.preferences / "README.md", card(report, run.path.name))
    run.update(
        preferences={
            "strategy": strategy,
            "margin": margin,
            "max_pairs": max_pairs,
            "pairs": report.pairs,
        }
    )
    run.event(
        "pairs",
        "built",
        strategy=strategy,
        pairs=report.pairs,
        states=report.states,
        no_spread=report.no_spread,
    )
    return report


def unparsed_reward(run: Run) -> float | None:
    """Return the recipe's reward for unparsed completions; None if the recipe sets none."""
    section = run.manifest.sampling or {}
    reward = SamplingSettings.model_validate(section.get("sampling", {})).whole_reward
    return reward.unparsed_reward if isinstance(reward, RewardSettings) else None


def _rows(
    store: Store, policy_digest: str | None, report: PreferenceReport
) -> Iterator[dict[str, Any]]:
    last: tuple[str, str] | None = None
    for group in store.finished(policy_digest):
        question = (group.policy_digest, group.state.task_id)
        report.questions += question != last  # a question's groups are adjacent
        last = question
        pairs = make_pairs(_count(group, report), report.strategy, report.margin, report.max_pairs)
        report.states_with_pairs += bool(pairs)
        for pair in pairs:
            yield _row(group, pair, report)
    if not report.samples:
        raise no_finished_question(store, policy_digest)


def no_finished_question(store: Store, policy_digest: str | None) -> RunError:
    """Return the error for a run without finished questions; if samples failed, the error quotes the first failure."""
    failures = (sample.failure for group in store.groups(policy_digest) for sample in group.samples)
    failed = [failure.message for failure in failures if failure is not None]
    why = (
        f"{len(failed)} samples failed, for example: {failed[0]}; fix the cause and "
        if failed
        else ""
    )
    return RunError(
        f"{store.path} has no finished questions; {why}"
        f"run `leret sample RECIPE --run {store.path.parent}`{' again' if why else ' first'}"
    )


def _count(group: StateSamples, report: PreferenceReport) -> list[Sample]:
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    priced = with_unparsed_reward(group.samples, report.unparsed_reward)
    different = distinct(priced)
    report.states += 1
    report.samples += len(group.samples)
    report.rewarded += len(rewards)
    report.cut += sum(sample.is_cut for sample in group.samples)
    report.duplicates += sum(sample.reward is not None for sample in priced) - len(different)
    report.unscored += not rewards
    report.no_spread += len(reward_levels(priced)) == 1
    report.failures.update(
        sample.failure.kind for sample in group.samples if sample.failure is not None
    )
    report.reward_sum += sum(rewards)
    (low, high), n_bars = report.reward_range, len(report.histogram)
    for reward in rewards:
        report.histogram[min(int((reward - low) / (high - low) * n_bars), n_bars - 1)] += 1
    return different


def _row(group: StateSamples, pair: Pair, report: PreferenceReport) -> dict[str, Any]:
    chosen, rejected = pair
    report.pairs += 1
    report.margin_sum += _margin(pair)
    report.pairs_per_step[group.state.step] += 1
    report.pairs_by_prompts[f"{chosen.prompt} over {rejected.prompt}"] += 1
    values = (
        [dict(message) for message in group.state.messages],
        [{"role": "assistant", "content": chosen.completion}],
        [{"role": "assistant", "content": rejected.completion}],
        chosen.reward, rejected.reward,
        group.state.task_id, group.state.id, group.state.step, group.state.predictor,
        chosen.id, rejected.id, chosen.prompt, rejected.prompt,
        chosen.finish_reason, rejected.finish_reason, chosen.token_ids, rejected.token_ids,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first rewarded sample of each distinct completion."""
    by_text: dict[str, Sample] = {}
    for sample in samples:
        if sample.reward is not None and sample.completion is not None:
            by_text.setdefault(sample.completion, sample)
    return list(by_text.values())


def make_pairs(
    samples: Sequence[Sample], strategy: Strategy, margin: float = 0.0, max_pairs: int | None = None
) -> list[Pair]:
    """Return the pairs of a state, ordered by reward level, then by sample. A level is all samples with equal reward.

    Strategies: ``adjacent`` prefers each level to the next lower level (LeReT). ``best-worst`` prefers the highest to
    the lowest level. ``all`` prefers each level to all lower levels. ``margin`` keeps the pairs of ``all`` with a
    reward difference of at least ``margin``. At most ``max_pairs`` pairs are returned: the largest differences.
    """
    levels = [members for _, members in reward_levels(samples)]
    pairs = [pair for upper, lower in _LEVELS[strategy](levels) for pair in product(upper, lower)]
    if strategy == "margin":
        pairs = [pair for pair in pairs if _margin(pair) >= margin]
    if max_pairs is not None:
        widest = sorted(range(len(pairs)), key=lambda i: -_margin(pairs[i]))[:max_pairs]
        pairs = [pairs[i] for i in sorted(widest)]
    return pairs


_LEVELS: dict[
    Strategy, Callable[[list[list[Sample]]], Iterable[tuple[list[Sample], list[Sample]]]]
] = {
    "adjacent": pairwise,
    "best-worst": lambda levels: [(levels[0], levels[-1])] if len(levels) > 1 else [],
    "all": lambda levels: combinations(levels, 2),
    "margin": lambda levels: combinations(levels, 2),
}


def _margin(pair: Pair) -> float:
    return (pair[0].reward or 0.0) - (pair[1].reward or 0.0)


def state_targets(
    group: StateSamples,
    which: Literal["best", "random"] = "best",
    require_spread: bool = True,
    max_targets: int = 1,
    seed: int = 0,
) -> list[Sample]:
    """Return samples of a state as targets for its zero-shot prompt, so that the policy learns to do without demos.

    ``best`` draws from the highest reward level; ``random``, for comparison, draws from all rewarded ones. Returns at
    most ``max_targets`` distinct completions, and none if ``require_spread`` and all rewards are equal.
    """
    by_level = reward_levels(group.samples)
    if not by_level or (require_spread and len(by_level) == 1):
        return []
    rng = random.Random(int(digest("target", seed, which, group.state.draw), 16))
    members = (
        by_level[0][1] if which == "best" else [sample for _, level in by_level for sample in level]
    )
    return distinct(rng.sample(members, len(members)))[:max_targets]
