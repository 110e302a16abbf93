"""Scoring of rollouts: the rewards of `leret.rewards`, applied to the accumulated ranking after each hop."""

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
from leret.rewards import Scoring, scoring
from leret.rewards.answers import ANSWERS, answer_texts
from leret.rewards.corpus import CORPUS, CorpusMeasure
from leret.rewards.ranking import recall

BRIDGE_FOUND = "bridge_found"
"""Recall of the gold documents that the question does not name; a system must learn of them from other documents."""

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
    """Return a recipe's measures, then the measures that every report shows; ConfigError for an unknown measure."""
    every = {**measures, **{name: name for name in _ALWAYS if name not in measures}}
    scorings(every, "measures")
    return every


def scorings(measures: Measures, key: str = "measures") -> dict[str, Scoring]:
    """Return the functions of the measures, except `BRIDGE_FOUND`; ConfigError for an unknown measure or setting."""
    return {name: scoring(spec, key) for name, spec in measures.items() if name != BRIDGE_FOUND}


def corpus_measures(measures: Measures) -> dict[str, tuple[CorpusMeasure, str | None]]:
    """Return the measures of all answers together by name, each with the field that it reads."""
    parts = {name: part for name, one in scorings(measures).items() for part in one.parts.values()}
    return {
        name: (CORPUS[str(part.function)], part.arguments.get("field"))
        for name, part in parts.items()
        if part.function in CORPUS
    }


def scorable(measures: Measures, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks to which at least one of the measures applies."""
    functions = scorings(measures).values()
    return [task for task in tasks if any(function.applies(task) for function in functions)]


def label_notes(measures: Measures, tasks: Sequence[Task]) -> list[str]:
    """Describe the measures that do not apply to all tasks."""
    counts = {name: sum(map(one.applies, tasks)) for name, one in scorings(measures).items()}
    return [
        f"{name} applies to {n:,} of {len(tasks):,} questions{'' if n else ', so it is left out'}"
        for name, n in counts.items()
        if n < len(tasks)
    ]


def scores_search(measures: Measures, tasks: Sequence[Task]) -> bool:
    """Return True if any measure scores the documents found for one of the tasks, not a completion or an answer."""
    functions = [
        one
        for one in scorings(measures).values()
        if any(p.function not in _OF_TEXT for p in one.parts.values())
    ]
    return any(function.applies(task) for function in functions for task in tasks)


class Scorer:
    """Scores rollouts with measures; ``corpus`` provides the titles of gold documents."""

    def __init__(
        self, measures: Measures, tasks: Sequence[Task], corpus: Mapping[str, Document]
    ) -> None:
        self._rewards = scorings(measures)
        self.tasks = {task.id: task for task in tasks}
        self._hidden = (
            {task.id: hidden_gold(task, corpus) for task in tasks}
            if BRIDGE_FOUND in measures
            else {}
        )

    def rows(self, rollout: Rollout) -> list[ScoredHop]:
        """Return a row per hop, plus one if the run failed, stopped at an unparsed completion, or never searched."""
        task, steps, hops = self.tasks[rollout.task_id], rollout.steps, list(rollout.hops)
        if rollout.failure is not None or not hops:
            hops.append(Hop((), rollout.ranking, len(steps)))
        rows: list[ScoredHop] = []
        n_before = 0
        for i, hop in enumerate(hops, 1):
            last = i == len(hops)
            n_steps = len(steps) if last else hop.n_steps  # the last hop includes all later steps
            text, outputs = (
                (steps[n_steps - 1].completion, steps[n_steps - 1].outputs)
                if n_steps
                else (None, None)
            )
            prediction = rollout.prediction if last else None
            outcome = Outcome(task, text or "", outputs or {}, hop.ranking, prediction, n_steps)
            completion = steps[hop.n_steps - 1].completion if hop.n_steps else None
            query = " ".join(hop.queries) if hop.queries else None
            place = (task.id, task.type, rollout.index, i, query, completion)
            ranking = outcome.doc_ids, tuple(passage.score for passage in hop.ranking)
            n_calls = sum(
                s.completion is not None and s.value is None for s in steps[n_before:n_steps]
            )  # except picks
            end = (rollout.unparsed, rollout.error) if last else (False, None)
            value = steps[hop.n_steps - 1].value if hop.n_steps else None
            measures = {} if rollout.error else self._values(outcome, rollout.unparsed and last)
            answer = (_encoded(prediction), _picks(steps)) if last else (None, ())
            n_tokens = sum(step.n_tokens for step in steps[n_before:n_steps])
            rows.append(
                ScoredHop(*place, *ranking, measures, n_calls, *end, value, *answer, n_tokens)
            )
            n_before = n_steps
        return rows

    def _values(self, outcome: Outcome, unparsed: bool) -> dict[str, float]:
        # Without a reader, an unparsed completion is an empty answer. Users' functions may expect the program's result.
        ended = (
            replace(outcome, prediction="") if unparsed and outcome.prediction is None else outcome
        )
        values = {
            name: one(outcome if one.calls_users else ended) for name, one in self._rewards.items()
        }
        if hidden := self._hidden.get(outcome.task.id):
            values[BRIDGE_FOUND] = recall(outcome.task.gold_ids(outcome.doc_ids), hidden)
        return {name: value for name, value in values.items() if value is not None}


def hidden_gold(question: Task, corpus: Mapping[str, Document]) -> tuple[str, ...]:
    """Return the ids of gold documents whose titles (without parentheses at their end) are not in the question.

    >>> corpus = {"a": Document("a", "Ed Wood (film)", ""), "b": Document("b", "Los Angeles", "")}
    >>> hidden_gold(Task.question("q", "Where was Ed Wood shot?", gold=("a", "b")), corpus)
    ('b',)
    """
    text = f" {_words(question.text)} "
    return tuple(
        doc_id
        for doc_id in question.gold
        if (document := find(corpus, doc_id))
        and (title := _title(document))
        and f" {title} " not in text
    )


def _encoded(prediction: Any) -> str | None:
    texts = answer_texts(prediction)
    return None if texts is None else json.dumps(texts, ensure_ascii=False)


def _picks(steps: Sequence[LMCall]) -> tuple[str, ...]:
    choices = [
        (step.outputs or {}).get("id")
        for step in steps
        if step.inputs.keys() >= {"candidates", "picked"}
    ]
    return tuple(id for id in choices if isinstance(id, str) and id != STOP.id)


def _title(document: Document) -> str:
    return _words(re.sub(r"\s*\([^()]*\)\s*$", "", document.title)) or _words(document.title)


def _words(text: str) -> str:
    return re.sub(r"\W+", " ", fold_accents(text).casefold()).strip()
