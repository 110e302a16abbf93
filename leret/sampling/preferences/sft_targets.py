"""Completions to imitate: what supervised fine-tuning reads from the store.

The prompt is the zero-shot one, whatever prompt of the bank the completion came from: what the demos do is distilled
into the policy (context distillation).
"""

from __future__ import annotations

import random
from typing import Any, Literal

from leret.core.types import Sample, digest
from leret.sampling.preferences.pairs import distinct
from leret.sampling.rollouts.selection import reward_levels
from leret.sampling.store.schema import StateSamples
from leret.sampling.store.store import Store


def sft_targets(
    store: Store,
    which: Literal["best", "random"] = "best",
    require_spread: bool = True,
    max_targets: int = 1,
    seed: int = 0,
    policy_digest: str | None = None,
) -> list[dict[str, Any]]:
    """Targets of the states of finished questions, in the order of the store.

    Args:
        store: of a run.
        which: ``best``: drawn from the highest reward level of the state; ``random``: from all completions that have
            a reward, as often as they were sampled (the control that says whether the reward does it).
        require_spread: leave out states whose completions all have the same reward: nothing was better there.
        max_targets: different completions a state, at most.
        seed: of the draw.
        policy_digest: samples of this policy alone.

    Returns:
        Rows of ``prompt`` (messages), ``completion`` (text), ``question_id``, ``state_id``, ``step``, ``predictor``,
        ``sample_id`` and ``reward``.
    """
    rows = []
    for group in store.finished(policy_digest):
        by_level = reward_levels(group.samples)
        if not by_level or (require_spread and len(by_level) == 1):
            continue
        rng = random.Random(int(digest("target", seed, which, group.state.id), 16))
        members = by_level[0][1] if which == "best" else [sample for _, level in by_level for sample in level]
        drawn = distinct(rng.sample(members, len(members)))[:max_targets]
        rows += [_row(group, sample) for sample in drawn]
    return rows


def _row(group: StateSamples, sample: Sample) -> dict[str, Any]:
    return {
        "prompt": [dict(message) for message in group.state.messages],
        "completion": sample.completion,
        "question_id": sample.question_id,
        "state_id": sample.state_id,
        "step": sample.step,
        "predictor": group.state.predictor,
        "sample_id": sample.id,
        "reward": sample.reward,
    }
