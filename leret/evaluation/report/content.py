"""Content of the report beside the summary: example questions, rewards, margins and curves."""

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

_PART = re.compile(r"rewards/((?!reward/).+)/mean")
"""Logged mean of a part of the reward; TRL logs the whole reward as the part ``reward``."""

_PERCENTILE = "reward_percentiles/"
"""Prefix of the logged percentiles of the rewards."""


def examples(
    policy: tuple[str, Sequence[ScoredHop]],
    rival: tuple[str, Sequence[ScoredHop]],
    questions: Sequence[Task],
    corpus: Mapping[str, Document],
    n: int,
    measure: str = "ap",
) -> dict[str, Any]:
    """Select the ``n`` questions that a policy wins by most, and those that it loses by most."""
    policy_runs = _finished(policy[1])
    rival_runs = _finished(rival[1])

    def show(gain: float, question: Task) -> dict[str, Any]:
        policy_run = policy_runs[question.id]
        rival_run = rival_runs[question.id]
        return {
            "question_id": question.id,
            "question": question.inputs.get("question", question.text),
            "answer": " / ".join(question.answers) or None,
            "type": question.type,
            "gold": [_title(doc_id, corpus) for doc_id in question.gold],
            "difference": round(gain, 6),
            "policy": _hops(policy_run, question, corpus),
            "rival": _hops(rival_run, question, corpus),
            "answers": {"policy": _answer(policy_run[-1]), "rival": _answer(rival_run[-1])},
        }

    improved = []
    worsened = []
    for question in questions:
        if question.id not in policy_runs or question.id not in rival_runs:
            continue
        value = policy_runs[question.id][-1].measures.get(measure)
        rival_value = rival_runs[question.id][-1].measures.get(measure)
        if value is None or rival_value is None:
            continue
        gain = value - rival_value
        if gain > 0:
            improved.append((gain, question))
        elif gain < 0:
            worsened.append((gain, question))
    improved.sort(key=lambda pair: (-pair[0], pair[1].id))
    worsened.sort(key=lambda pair: (pair[0], pair[1].id))
    return {
        "policy": policy[0],
        "rival": rival[0],
        "measure": measure,
        "improved": [show(*pair) for pair in improved[:n]],
        "worsened": [show(*pair) for pair in worsened[:n]],
    }


def _finished(rows: Sequence[ScoredHop]) -> dict[str, list[ScoredHop]]:
    """Map question ids to the first run on each question, without runs that failed."""
    runs = {}
    for question_id, run in first_runs(rows).items():
        if not any(row.failure for row in run):
            runs[question_id] = run
    return runs


def _answer(row: ScoredHop) -> str | None:
    answer = prediction_of(row)
    if isinstance(answer, dict):
        return "; ".join(f"{name}: {text}" for name, text in answer.items())
    return answer


def _title(doc_id: str, corpus: Mapping[str, Document]) -> str:
    document = find(corpus, doc_id)
    return (document.title if document else "") or doc_id


def _hops(
    run: Sequence[ScoredHop], question: Task, corpus: Mapping[str, Document]
) -> list[dict[str, Any]]:
    hops = []
    before: Sequence[str] = ()
    for row in run:
        documents = []
        for doc_id in row.doc_ids:
            if doc_id not in before:
                is_gold = question.parents.get(doc_id, doc_id) in question.gold
                documents.append({"title": _title(doc_id, corpus), "gold": is_gold})
        hop = {
            "hop": row.hop,
            "query": row.query,
            "completion": row.completion,
            "unparsed": row.unparsed,
            "recall": row.measures.get("recall"),
            "ap": row.measures.get("ap"),
            "found": documents,
        }
        hops.append(hop)
        before = row.doc_ids
    return hops


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

    ``n_spread`` is the number of states whose samples differ in reward, ``n_cut`` of ``n_samples``
    completions were cut at ``max_tokens``.
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
        for group in store.groups():
            if not group.samples[0].is_sampled:
                continue
            values = [sample.reward for sample in group.samples if sample.reward is not None]
            rewards[group.state.step] += values
            n_states += 1
            n_spread += len(set(values)) > 1
            n_samples += len(group.samples)
            for sample in group.samples:
                n_cut += sample.is_cut
                if sample.failure is not None:
                    failures[sample.failure.kind] += 1
        rounds = _rounds(store, run.manifest.rounds)
    return TrainingData(
        dict(rewards), _margins(run), n_states, n_spread, failures, rounds, n_samples, n_cut
    )


def _rounds(store: Store, begun: Sequence[Mapping[str, Any]]) -> tuple[SampledRound, ...]:
    if len(begun) < 2:
        return ()
    rounds = []
    for note in begun:
        rewards: list[float] = []
        n_states = n_spread = 0
        for group in store.groups(note["digest"]):
            if group.samples[0].is_sampled:
                values = [sample.reward for sample in group.samples if sample.reward is not None]
                rewards += values
                n_states += 1
                n_spread += len(set(values)) > 1
        sampled = SampledRound(
            policy=note["policy"],
            part=note.get("part", "all"),
            n_states=n_states,
            n_samples=len(rewards),
            mean_reward=sum(rewards) / max(1, len(rewards)),
            spread=n_spread / max(1, n_states),
        )
        rounds.append(sampled)
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
                f"{path} cannot be read ({error}); rebuild it: leret rescore --run {run.path}"
            ) from error
        for step, chosen, rejected in zip(*table.values(), strict=True):
            margins[step].append(chosen - rejected)
    return dict(margins)


def curves_of(training: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Panel]]]:
    """Return (policy, panels) for policies with curves of at least two logged points."""
    curves = []
    for name, note in training.items():
        log = [values for values in note.get("log_history") or () if "step" in values]
        panels: list[Panel] = []
        for title, keys in (*_PANELS[:2], ("mean of each reward part", _parts(log)), *_PANELS[2:]):
            lines = {}
            for key, label in keys.items():
                points = [(row["step"], row[key]) for row in log if row.get(key) is not None]
                if len(points) > 1:
                    lines[label] = points
            if lines:
                panels.append((title, lines))
        distributions = _distributions(log, "round" if note.get("rounds") else "step")
        if distributions:
            panels.append(("reward by percentile, at five points", distributions))
        if panels:
            curves.append((name, panels))
    return curves


def _parts(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Map the logged keys of reward parts to the names of the parts."""
    parts = {}
    for values in log:
        for key in values:
            match = _PART.fullmatch(key)
            if match:
                parts[key] = match[1]
    return parts


def _distributions(
    log: Sequence[Mapping[str, Any]], unit: str, n: int = 5
) -> dict[str, list[tuple[float, float]]]:
    """Return (percentile, reward) points at ``n`` evenly spaced log rows, named by ``unit``."""
    rows = [row for row in log if f"{_PERCENTILE}0" in row]
    distributions: dict[str, list[tuple[float, float]]] = {}
    if not rows:
        return distributions
    for index in dict.fromkeys(round(i * (len(rows) - 1) / (n - 1)) for i in range(n)):
        points = []
        for key, value in rows[index].items():
            if key.startswith(_PERCENTILE):
                points.append((float(key.removeprefix(_PERCENTILE)), value))
        distributions[f"{unit} {rows[index]['step']}"] = points
    return distributions
