"""Scoring of rollouts: the rewards of `leret.rewards`, applied to the ranking after each hop."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from leret.config.sampling import RewardSettings
from leret.core.types import STOP, Document, Hop, LMCall, Outcome, Rollout, Task
from leret.datasets.corpus import find
from leret.evaluation.results import ScoredHop
from leret.retrieval.engines.bm25 import fold_accents
from leret.rewards import Part, Scoring, scoring
from leret.rewards.answers import ANSWERS, answer_texts
from leret.rewards.corpus import CORPUS, CorpusMeasure
from leret.rewards.ranking import recall

BRIDGE_FOUND = "bridge_found"
"""Recall of the gold documents that the question does not name.

A system must learn of them from other documents.
"""

_OF_TEXT = frozenset({*ANSWERS, "format", "steps"})  # measures of completions and answers

LABELS = {
    "recall": "recall",
    "ap": "AP",
    "all_found": "all gold found",
    "bridge_found": "unnamed gold found",
    "ndcg": "nDCG",
    "rr": "reciprocal rank",
    "success": "any gold found",
    "fact_em": "fact EM",
    "fact_f1": "fact F1",
}
"""Labels of measures in tables and plots. A measure without a label is shown by name."""

_ALWAYS = ("recall", "ap", "all_found", BRIDGE_FOUND)


Measures = Mapping[str, str | RewardSettings]
"""Measures by name: their names in `REWARDS`, or sections with settings."""


def all_measures(measures: Measures) -> Measures:
    """Return a recipe's measures, then the measures that every report shows.

    ConfigError for an unknown measure.
    """
    every = {**measures, **{name: name for name in _ALWAYS if name not in measures}}
    scorings(every, "measures")
    return every


def scorings(measures: Measures, key: str = "measures") -> dict[str, Scoring]:
    """Return the functions of the measures, except `BRIDGE_FOUND`.

    ConfigError for an unknown measure or setting.
    """
    return {name: scoring(spec, key) for name, spec in measures.items() if name != BRIDGE_FOUND}


def corpus_measures(measures: Measures) -> dict[str, tuple[CorpusMeasure, str | None]]:
    """Return the measures of all answers together by name, each with the field that it reads."""
    parts: dict[str, Part] = {}
    for function in scorings(measures).values():
        parts.update(function.parts)
    corpus = {}
    for name, part in parts.items():
        if part.function in CORPUS:
            corpus[name] = (CORPUS[str(part.function)], part.arguments.get("field"))
    return corpus


def scorable(measures: Measures, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks to which at least one of the measures applies."""
    functions = scorings(measures).values()
    applicable = []
    for task in tasks:
        if any(function.applies(task) for function in functions):
            applicable.append(task)
    return applicable


def label_notes(measures: Measures, tasks: Sequence[Task]) -> list[str]:
    """Describe the measures that do not apply to all tasks."""
    notes = []
    for name, function in scorings(measures).items():
        n = sum(map(function.applies, tasks))
        if n < len(tasks):
            note = f"{name} applies to {n:,} of {len(tasks):,} questions"
            notes.append(note if n else f"{note}, so it is left out")
    return notes


def scores_search(measures: Measures, tasks: Sequence[Task]) -> bool:
    """Return True if any measure scores the documents found for a task.

    Measures of completions and answers do not.
    """
    for function in scorings(measures).values():
        if all(part.function in _OF_TEXT for part in function.parts.values()):
            continue
        if any(map(function.applies, tasks)):
            return True
    return False


class Scorer:
    """Scores rollouts with measures; ``corpus`` provides the titles of gold documents."""

    def __init__(
        self, measures: Measures, tasks: Sequence[Task], corpus: Mapping[str, Document]
    ) -> None:
        self._rewards = scorings(measures)
        self.tasks = {task.id: task for task in tasks}
        self._hidden: dict[str, tuple[str, ...]] = {}
        if BRIDGE_FOUND in measures:
            self._hidden = {task.id: hidden_gold(task, corpus) for task in tasks}

    def rows(self, rollout: Rollout) -> list[ScoredHop]:
        """Return a row per hop.

        A run that failed, stopped at an unparsed completion, or never searched has one more row.
        """
        hops = list(rollout.hops)
        if rollout.failure is not None or not hops:
            hops.append(Hop((), rollout.ranking, len(rollout.steps)))
        rows: list[ScoredHop] = []
        n_before = 0
        for number, hop in enumerate(hops[:-1], 1):
            rows.append(self._row(rollout, number, hop, rollout.steps[n_before : hop.n_steps]))
            n_before = hop.n_steps
        end = self._row(rollout, len(hops), hops[-1], rollout.steps[n_before:], is_last=True)
        return [*rows, end]

    def _row(
        self,
        rollout: Rollout,
        number: int,
        hop: Hop,
        steps: Sequence[LMCall],
        is_last: bool = False,
    ) -> ScoredHop:
        """Return the row of a hop; ``steps`` are those since the hop before."""
        task = self.tasks[rollout.task_id]
        n_steps = len(rollout.steps) if is_last else hop.n_steps
        text = ""
        outputs: Mapping[str, Any] = {}
        if n_steps:
            text = rollout.steps[n_steps - 1].completion or ""
            outputs = rollout.steps[n_steps - 1].outputs or {}
        completion: str | None = None
        value: float | None = None
        if hop.n_steps:
            completion = rollout.steps[hop.n_steps - 1].completion
            value = rollout.steps[hop.n_steps - 1].value
        prediction = rollout.prediction if is_last else None
        unparsed = rollout.unparsed and is_last
        outcome = Outcome(task, text, outputs, hop.ranking, prediction, n_steps)
        return ScoredHop(
            question_id=task.id,
            type=task.type,
            sample=rollout.index,
            hop=number,
            query=" ".join(hop.queries) if hop.queries else None,
            completion=completion,
            doc_ids=outcome.doc_ids,
            scores=tuple(passage.score for passage in hop.ranking),
            measures={} if rollout.error else self._values(outcome, unparsed),
            # except picks
            lm_calls=sum(step.completion is not None and step.value is None for step in steps),
            unparsed=unparsed,
            failure=rollout.error if is_last else None,
            value=value,
            prediction=_encoded(prediction) if is_last else None,
            picked=_picks(rollout.steps) if is_last else (),
            n_tokens=sum(step.n_tokens for step in steps),
        )

    def _values(self, outcome: Outcome, unparsed: bool) -> dict[str, float]:
        # Without a reader, an unparsed completion is an empty answer.
        # Users' functions may expect the program's result.
        answered = outcome
        if unparsed and outcome.prediction is None:
            answered = replace(outcome, prediction="")
        values: dict[str, float] = {}
        for name, function in self._rewards.items():
            value = function(outcome if function.calls_users else answered)
            if value is not None:
                values[name] = value
        hidden = self._hidden.get(outcome.task.id)
        if hidden:
            values[BRIDGE_FOUND] = recall(outcome.task.gold_ids(outcome.doc_ids), hidden)
        return values


def hidden_gold(question: Task, corpus: Mapping[str, Document]) -> tuple[str, ...]:
    """Return the ids of gold documents with titles that are not in the question.

    Parentheses at the end of a title are ignored.

    >>> corpus = {"a": Document("a", "Ed Wood (film)", ""), "b": Document("b", "Los Angeles", "")}
    >>> hidden_gold(Task.question("q", "Where was Ed Wood shot?", gold=("a", "b")), corpus)
    ('b',)
    """
    text = f" {_words(question.text)} "
    hidden = []
    for doc_id in question.gold:
        document = find(corpus, doc_id)
        title = _title(document) if document else ""
        if title and f" {title} " not in text:
            hidden.append(doc_id)
    return tuple(hidden)


def _encoded(prediction: Any) -> str | None:
    texts = answer_texts(prediction)
    return None if texts is None else json.dumps(texts, ensure_ascii=False)


def _picks(steps: Sequence[LMCall]) -> tuple[str, ...]:
    picks = []
    for step in steps:
        if step.inputs.keys() >= {"candidates", "picked"}:
            id = (step.outputs or {}).get("id")
            if isinstance(id, str) and id != STOP.id:
                picks.append(id)
    return tuple(picks)


def _title(document: Document) -> str:
    return _words(re.sub(r"\s*\([^()]*\)\s*$", "", document.title)) or _words(document.title)


def _words(text: str) -> str:
    return re.sub(r"\W+", " ", fold_accents(text).casefold()).strip()
