"""Metrics of a round's samples for the log, named as in TRL where TRL has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, float64, tensor

from leret.core.types import Choice, Sample, State, Task
from leret.policies.base import Completion

Group = tuple[State, Sequence[Sample]]


def completion_facts(
    groups: Sequence[Group], completions: Mapping[int, tuple[Sequence[int] | Choice, Completion]]
) -> dict[str, float]:
    """Return the means over a round's completions; ``completions`` maps a sample's seed to its request and answer."""
    completed = [one for _, samples in groups for one in samples if one.completion is not None]
    written = [completions[one.seed][1] for one in completed if one.seed in completions]
    logprobs = [value for one in written for value in one.logprobs or ()]
    lengths = [len(one.token_ids) for one in written if one.token_ids]  # picks have none
    facts = {"completions/mean_length": sum(lengths) / len(lengths)} if lengths else {}
    facts |= {
        "completions/clipped_ratio": sum(one.finish_reason == "length" for one in written)
        / max(1, len(written)),
        "num_samples": float(len(completed)),
        "num_completions": float(len(completions)),  # continuations included
        "num_completion_tokens": float(
            sum(len(one.token_ids or ()) for _, one in completions.values())
        ),
    }
    return facts | ({"entropy": -sum(logprobs) / len(logprobs)} if logprobs else {})


def reward_percentiles(rewards: Tensor) -> dict[str, float]:
    """Return every tenth percentile of the rewards (n,) for the log, from the minimum (0) to the maximum (100)."""
    if not len(rewards):
        return {}
    values = rewards.double().quantile(tensor([share / 10 for share in range(11)], dtype=float64))
    return {f"reward_percentiles/{10 * i}": float(value) for i, value in enumerate(values)}


def distinct(groups: Sequence[Group]) -> float:
    """Return the fraction of distinct completions per state, averaged over the states with several completions."""
    texts = [
        [sample.completion for sample in samples if sample.completion is not None]
        for _, samples in groups
    ]
    shares = [len(set(group)) / len(group) for group in texts if len(group) > 1]
    return sum(shares) / len(shares) if shares else 1.0


def word_facts(groups: Sequence[Group], tasks: Sequence[Task], replies: bool) -> dict[str, float]:
    """Return metrics that show when a writer collapses.

    ``completions/distinct_1`` is the share of distinct words among all words of one completion per state, because the
    completions of a state may agree. With ``replies``, samples that write one text are answers;
    ``completions/length_ratio`` is their number of words divided by that of the references with the closest lengths.
    """
    answers = {task.id: [len(answer.split()) for answer in task.answers] for task in tasks}
    written = [[one for one in group if one.completion and one.is_sampled] for _, group in groups]
    samples = [sample for group in written for sample in group]
    words = [
        word
        for group in written
        for one in group[:1]
        for word in (one.completion or "").lower().split()
    ]
    facts = {"completions/distinct_1": len(set(words)) / len(words)} if words else {}
    n_written = n_expected = 0
    for sample in samples if replies else ():
        texts = [text for text in sample.outputs.values() if isinstance(text, str)]
        if len(texts) == 1 and answers.get(sample.task_id):
            n = len(texts[0].split())
            n_written += n
            n_expected += min(answers[sample.task_id], key=lambda expected: abs(expected - n))
    return facts | ({"completions/length_ratio": n_written / n_expected} if n_expected else {})
