"""Metrics of a round's samples for the log, named as in TRL where TRL has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, float64, tensor

from leret.core.types import Choice, Sample, State, Task
from leret.policies.base import Completion

Group = tuple[State, Sequence[Sample]]


def completed_samples(groups: Iterable[Group]) -> list[Sample]:
    """Return the samples of all groups that have a completion."""
    samples: list[Sample] = []
    for _, group in groups:
        samples += [sample for sample in group if sample.completion is not None]
    return samples


def completion_facts(
    groups: Sequence[Group], completions: Mapping[int, tuple[Sequence[int] | Choice, Completion]]
) -> dict[str, float]:
    """Return the means over a round's completions.

    ``completions`` maps a sample's seed to its request and answer.
    """
    samples = completed_samples(groups)
    answers = [completions[sample.seed][1] for sample in samples if sample.seed in completions]
    logprobs: list[float] = []
    for answer in answers:
        logprobs += answer.logprobs or ()
    n_clipped = sum(answer.finish_reason == "length" for answer in answers)
    n_tokens = sum(len(answer.token_ids or ()) for _, answer in completions.values())
    metrics: dict[str, float] = {}
    lengths = [len(answer.token_ids) for answer in answers if answer.token_ids]  # picks have none
    if lengths:
        metrics["completions/mean_length"] = sum(lengths) / len(lengths)
    metrics["completions/clipped_ratio"] = n_clipped / max(1, len(answers))
    metrics["num_samples"] = float(len(samples))
    metrics["num_completions"] = float(len(completions))  # continuations included
    metrics["num_completion_tokens"] = float(n_tokens)
    if logprobs:
        metrics["entropy"] = -sum(logprobs) / len(logprobs)
    return metrics


def reward_percentiles(rewards: Tensor) -> dict[str, float]:
    """Return every tenth percentile of the rewards (n,), from minimum (0) to maximum (100)."""
    if not len(rewards):
        return {}
    shares = tensor([share / 10 for share in range(11)], dtype=float64)
    values = rewards.double().quantile(shares)
    return {f"reward_percentiles/{10 * i}": float(value) for i, value in enumerate(values)}


def distinct(groups: Sequence[Group]) -> float:
    """Return the fraction of distinct completions per state.

    It is averaged over the states with several completions.
    """
    shares: list[float] = []
    for group in groups:
        texts = [sample.completion for sample in completed_samples([group])]
        if len(texts) > 1:
            shares.append(len(set(texts)) / len(texts))
    if not shares:
        return 1.0
    return sum(shares) / len(shares)


def word_facts(groups: Sequence[Group], tasks: Sequence[Task], replies: bool) -> dict[str, float]:
    """Return metrics that show when a writer collapses.

    ``completions/distinct_1`` is the share of distinct words among all words of one completion per
    state, because the completions of a state may agree. With ``replies``, samples that write one
    text are answers; ``completions/length_ratio`` is their number of words divided by that of the
    references with the closest lengths.
    """
    samples: list[Sample] = []
    words: list[str] = []
    for _, group in groups:
        written = [sample for sample in group if sample.completion and sample.is_sampled]
        samples += written
        if written:
            words += (written[0].completion or "").lower().split()
    metrics: dict[str, float] = {}
    if words:
        metrics["completions/distinct_1"] = len(set(words)) / len(words)
    ratio = _length_ratio(samples, tasks) if replies else None
    if ratio is not None:
        metrics["completions/length_ratio"] = ratio
    return metrics


def _length_ratio(samples: Sequence[Sample], tasks: Sequence[Task]) -> float | None:
    expected: dict[str, list[int]] = {}
    for task in tasks:
        expected[task.id] = [len(answer.split()) for answer in task.answers]
    n_written = 0
    n_expected = 0
    for sample in samples:
        texts = [text for text in sample.outputs.values() if isinstance(text, str)]
        lengths = expected.get(sample.task_id)
        if len(texts) != 1 or not lengths:
            continue
        n_words = len(texts[0].split())
        n_written += n_words
        n_expected += min(lengths, key=lambda length: abs(length - n_words))
    if not n_expected:
        return None
    return n_written / n_expected
