"""Training data from a store: preference pairs in Parquet (with TRL's columns), and targets for imitation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise, product
from typing import Any, Literal

from leret.config.sampling import RewardSettings, SamplingSettings
from leret.core.errors import RunError
from leret.core.files import atomic_file, write_atomically
from leret.core.runs import Run
from leret.core.types import Failure, Sample, digest
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
    """Rebuild R/preferences from questions finished by a policy (default: the run's).

    Raises:
        RunError: there are none.
    """
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
    settings = SamplingSettings.model_validate(section.get("sampling", {}))
    reward = settings.whole_reward
    if isinstance(reward, RewardSettings):
        return reward.unparsed_reward
    return None


def _rows(
    store: Store, policy_digest: str | None, report: PreferenceReport
) -> Iterator[dict[str, Any]]:
    last: tuple[str, str] | None = None
    for group in store.finished(policy_digest):
        question = (group.policy_digest, group.state.task_id)
        report.questions += question != last  # a question's groups are adjacent
        last = question
        samples = _count(group, report)
        pairs = make_pairs(samples, report.strategy, report.margin, report.max_pairs)
        report.states_with_pairs += bool(pairs)
        for pair in pairs:
            yield _row(group, pair, report)
    if not report.samples:
        raise no_finished_question(store, policy_digest)


def no_finished_question(store: Store, policy_digest: str | None) -> RunError:
    """Return the error for a run without finished questions.

    If samples failed, the error quotes the first failure.
    """
    failures: list[Failure] = []
    for group in store.groups(policy_digest):
        failures += [sample.failure for sample in group.samples if sample.failure is not None]
    command = f"run `leret sample RECIPE --run {store.path.parent}`"
    if not failures:
        return RunError(f"{store.path} has no finished questions; {command} first")
    return RunError(
        f"{store.path} has no finished questions; {len(failures)} samples failed, for example: "
        f"{failures[0].message}; fix the cause and {command} again"
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
    for sample in group.samples:
        if sample.failure is not None:
            report.failures[sample.failure.kind] += 1
    report.reward_sum += sum(rewards)
    low, high = report.reward_range
    n_bars = len(report.histogram)
    for reward in rewards:
        bar = int((reward - low) / (high - low) * n_bars)
        report.histogram[min(bar, n_bars - 1)] += 1
    return different


def _row(group: StateSamples, pair: Pair, report: PreferenceReport) -> dict[str, Any]:
    chosen, rejected = pair
    report.pairs += 1
    report.margin_sum += _margin(pair)
    report.pairs_per_step[group.state.step] += 1
    report.pairs_by_prompts[f"{chosen.prompt} over {rejected.prompt}"] += 1
    state = group.state
    return {
        "prompt": [dict(message) for message in state.messages],
        "chosen": [{"role": "assistant", "content": chosen.completion}],
        "rejected": [{"role": "assistant", "content": rejected.completion}],
        "score_chosen": chosen.reward,
        "score_rejected": rejected.reward,
        "question_id": state.task_id,
        "state_id": state.id,
        "step": state.step,
        "predictor": state.predictor,
        "chosen_id": chosen.id,
        "rejected_id": rejected.id,
        "chosen_prompt": chosen.prompt,
        "rejected_prompt": rejected.prompt,
        "chosen_finish_reason": chosen.finish_reason,
        "rejected_finish_reason": rejected.finish_reason,
        "chosen_token_ids": chosen.token_ids,
        "rejected_token_ids": rejected.token_ids,
    }


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
    """Return the pairs of a state, ordered by reward level, then by sample.

    A level is all samples with equal reward.

    Strategies: ``adjacent`` prefers each level to the next lower level (LeReT). ``best-worst``
        prefers the highest to
    the lowest level. ``all`` prefers each level to all lower levels. ``margin`` keeps the pairs of
    ``all`` with a reward difference of at least ``margin``. At most ``max_pairs`` pairs are
    returned: the largest differences.
    """
    levels = [members for _, members in reward_levels(samples)]
    pairs: list[Pair] = []
    for upper, lower in _LEVELS[strategy](levels):
        pairs += product(upper, lower)
    if strategy == "margin":
        pairs = [pair for pair in pairs if _margin(pair) >= margin]
    if max_pairs is not None:
        by_margin = sorted(range(len(pairs)), key=lambda i: -_margin(pairs[i]))
        pairs = [pairs[i] for i in sorted(by_margin[:max_pairs])]
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
    chosen, rejected = pair
    return (chosen.reward or 0.0) - (rejected.reward or 0.0)


def state_targets(
    group: StateSamples,
    which: Literal["best", "random"] = "best",
    require_spread: bool = True,
    max_targets: int = 1,
    seed: int = 0,
) -> list[Sample]:
    """Return samples as targets for the zero-shot prompt, so that policies learn without demos.

    ``best`` draws from the highest reward level; ``random``, for comparison, draws from all
    rewarded ones. Returns at most ``max_targets`` distinct completions, and none if
    ``require_spread`` and all rewards are equal.
    """
    by_level = reward_levels(group.samples)
    if not by_level or (require_spread and len(by_level) == 1):
        return []
    rng = random.Random(int(digest("target", seed, which, group.state.draw), 16))
    levels = [samples for _, samples in by_level]
    if which == "best":
        levels = levels[:1]
    samples = list(chain.from_iterable(levels))
    shuffled = rng.sample(samples, len(samples))
    return distinct(shuffled)[:max_targets]
