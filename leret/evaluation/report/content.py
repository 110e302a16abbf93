"""Content of the report in addition to the summary: example questions, rewards, margins and training curves."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.core.types import Document, Task
from leret.datasets.corpus import find
from leret.evaluation.results import ScoredHop, first_runs, prediction_of
from leret.sampling.store.store import Store

if TYPE_CHECKING:
    from leret.evaluation.report.plots import Panel

_PANELS = (
    ("validation recall", {"eval_recall": "recall"}),
    ("mean reward", {"reward": "reward", "objective/scores": "reward before the KL penalty"}),
    ("KL to the initial policy, nats", {"kl": "KL", "objective/kl": "KL"}),
    ("entropy, nats per token", {"entropy": "entropy", "policy/entropy": "entropy"}),
    ("share of groups without spread", {"frac_reward_zero_std": "share"}),
    ("share of unparsed completions", {"completions/unparsed": "share"}),
    ("mean length of a completion, tokens", {"completions/mean_length": "tokens"}),
    ("loss", {"loss": "loss"}),
    ("share of pairs with chosen preferred", {"rewards/accuracies": "share"}),
    ("implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
    ("gradient norm", {"grad_norm": "norm"}),
)

_PART, _PERCENTILE = re.compile(r"rewards/((?!reward/).+)/mean"), "reward_percentiles/"
"""Logged metrics: the mean of a part (TRL logs the whole reward as the part ``reward``), percentiles of the rewards."""


def examples(
    policy: tuple[str, Sequence[ScoredHop]],
    rival: tuple[str, Sequence[ScoredHop]],
    questions: Sequence[Task],
    corpus: Mapping[str, Document],
    n: int,
    measure: str = "ap",
) -> dict[str, Any]:
    """Select the ``n`` questions on which a policy beats a rival by most, and the ``n`` on which it loses by most."""
    ours, theirs = (
        {name: run for name, run in first_runs(rows).items() if not any(row.failure for row in run)}
        for _, rows in (policy, rival)
    )

    def show(gain: float, question: Task) -> dict[str, Any]:
        return {
            "question_id": question.id,
            "question": question.inputs.get("question", question.text),
            "answer": " / ".join(question.answers) or None,
            "type": question.type,
            "gold": [_title(doc_id, corpus) for doc_id in question.gold],
            "difference": round(gain, 6),
            "policy": _hops(ours[question.id], question, corpus),
            "rival": _hops(theirs[question.id], question, corpus),
            "answers": {
                "policy": _answer(ours[question.id][-1]),
                "rival": _answer(theirs[question.id][-1]),
            },
        }

    one, other = (
        {id: run[-1].measures.get(measure) for id, run in runs.items()} for runs in (ours, theirs)
    )
    known = [(one.get(question.id), other.get(question.id), question) for question in questions]
    gains = [
        (end - rest, question)
        for end, rest, question in known
        if end is not None and rest is not None
    ]
    best = sorted((g for g in gains if g[0] > 0), key=lambda g: (-g[0], g[1].id))[:n]
    worst = sorted((g for g in gains if g[0] < 0), key=lambda g: (g[0], g[1].id))[:n]
    return {
        "policy": policy[0],
        "rival": rival[0],
        "measure": measure,
        "improved": [show(*gain) for gain in best],
        "worsened": [show(*gain) for gain in worst],
    }


def _answer(row: ScoredHop) -> str | None:
    answer = prediction_of(row)
    return (
        "; ".join(f"{name}: {text}" for name, text in answer.items())
        if isinstance(answer, dict)
        else answer
    )


def _title(doc_id: str, corpus: Mapping[str, Document]) -> str:
    document = find(corpus, doc_id)
    return (document.title if document else "") or doc_id


def _hops(
    run: Sequence[ScoredHop], question: Task, corpus: Mapping[str, Document]
) -> list[dict[str, Any]]:
    gold, parents = question.gold, question.parents
    before = [(), *(row.doc_ids for row in run)]
    return [
        {
            "hop": row.hop,
            "query": row.query,
            "completion": row.completion,
            "unparsed": row.unparsed,
            "recall": row.measures.get("recall"),
            "ap": row.measures.get("ap"),
            "found": [
                {"title": _title(i, corpus), "gold": parents.get(i, i) in gold}
                for i in row.doc_ids
                if i not in known
            ],
        }
        for row, known in zip(run, before, strict=False)
    ]


@dataclass(frozen=True)
class SampledRound:
    """One sampling round; ``spread`` is the share of states whose samples differ in reward."""

    policy: str
    part: str
    n_states: int
    n_samples: int
    mean_reward: float
    spread: float


@dataclass(frozen=True)
class TrainingData:
    """Rewards and margins of a run, by step.

    ``n_spread`` is the number of states whose samples differ in reward, ``n_cut`` of ``n_samples`` completions were cut
    at ``max_tokens``.
    """

    rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)
    margins: Mapping[int, Sequence[float]] = field(default_factory=dict)
    n_states: int = 0
    n_spread: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    rounds: Sequence[SampledRound] = ()  # empty for a run with a single round
    n_samples: int = 0
    n_cut: int = 0


def training_data(run: Run) -> TrainingData:
    """Read rewards from the store and margins from the preferences, if these files exist."""
    if not run.store.is_file():
        return TrainingData(margins=_margins(run))
    rewards: dict[int, list[float]] = defaultdict(list)
    failures: Counter[str] = Counter()
    n_states = n_spread = n_samples = n_cut = 0
    with Store(run.store, read_only=True) as store:
        for group in filter(lambda group: group.samples[0].is_sampled, store.groups()):
            values = [sample.reward for sample in group.samples if sample.reward is not None]
            rewards[group.state.step] += values
            n_states += 1
            n_spread += len(set(values)) > 1
            n_samples += len(group.samples)
            n_cut += sum(sample.is_cut for sample in group.samples)
            failures.update(
                sample.failure.kind for sample in group.samples if sample.failure is not None
            )
        rounds = _rounds(store, run.manifest.rounds)
    return TrainingData(
        dict(rewards), _margins(run), n_states, n_spread, failures, rounds, n_samples, n_cut
    )


def _rounds(store: Store, begun: Sequence[Mapping[str, Any]]) -> tuple[SampledRound, ...]:
    rounds = []
    for entry in begun if len(begun) > 1 else ():
        sampled = (
            group.samples for group in store.groups(entry["digest"]) if group.samples[0].is_sampled
        )
        states = [[s.reward for s in samples if s.reward is not None] for samples in sampled]
        rewards = [reward for values in states for reward in values]
        spread = sum(len(set(values)) > 1 for values in states) / max(1, len(states))
        mean = sum(rewards) / max(1, len(rewards))
        part = entry.get("part", "all")
        rounds.append(SampledRound(entry["policy"], part, len(states), len(rewards), mean, spread))
    return tuple(rounds)


def _margins(run: Run) -> dict[int, list[float]]:
    margins: dict[int, list[float]] = defaultdict(list)
    path = run.preferences / "train.parquet"
    if path.is_file():
        try:
            table = pq.read_table(
                path, columns=["step", "score_chosen", "score_rejected"]
            ).to_pydict()
        except (OSError, pa.ArrowException) as error:
            raise RunError(
                f"{path} cannot be read ({error}); rebuild it: leret pairs --run {run.path}"
            ) from error
        for step, chosen, rejected in zip(*table.values(), strict=True):
            margins[step].append(chosen - rejected)
    return dict(margins)


def curves_of(training: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Panel]]]:
    """Return (policy, panels) for policies with training curves; a curve needs at least two logged points."""
    curves = []
    for name, facts in training.items():
        log = [entry for entry in facts.get("log_history") or () if "step" in entry]
        names = dict.fromkeys(key for entry in log for key in entry)
        parts = {key: match[1] for key in names if (match := _PART.fullmatch(key))}
        panels: list[Panel] = []
        for title, keys in (*_PANELS[:2], ("mean of each reward part", parts), *_PANELS[2:]):
            drawn = {
                key: [(e["step"], e[key]) for e in log if e.get(key) is not None] for key in keys
            }
            lines = {keys[key]: points for key, points in drawn.items() if len(points) > 1}
            if lines:
                panels.append((title, lines))
        if distributions := _distributions(log, "round" if facts.get("rounds") else "step"):
            panels.append(("reward by percentile, at five points", distributions))
        if panels:
            curves.append((name, panels))
    return curves


def _distributions(
    log: Sequence[Mapping[str, Any]], unit: str, n: int = 5
) -> dict[str, list[tuple[float, float]]]:
    """Return (percentile, reward) points at ``n`` evenly spaced log entries, named by ``unit``."""
    entries = [entry for entry in log if f"{_PERCENTILE}0" in entry]
    places = (
        dict.fromkeys(round(i * (len(entries) - 1) / (n - 1)) for i in range(n)) if entries else {}
    )
    return {
        f"{unit} {entries[place]['step']}": [
            (float(key.removeprefix(_PERCENTILE)), value)
            for key, value in entries[place].items()
            if key.startswith(_PERCENTILE)
        ]
        for place in places
    }
