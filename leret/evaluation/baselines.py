"""Baselines for policies: rules in place of the LM; RM3; and HyDE.

Rules answer the steps of the real program, so the program's cut-offs, hops and `exclude_seen` apply to baselines too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dspy

from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import STOP, Choice, Document, Hop, LMCall, Rollout, Task
from leret.datasets.corpus import Corpus, find
from leret.evaluation.results import ScoredHop
from leret.policies.base import Policy
from leret.programs.needs import NeedsCompletion, Step
from leret.programs.prompts import Formatter
from leret.retrieval.base import Retriever
from leret.retrieval.engines.bm25 import BM25
from leret.rollouts.actors import Decoding

_PASSAGE_TOKENS = 128
"""Minimum `max_tokens` for HyDE's passage, because the policy's setting is meant for short queries."""

_HEAD_WORDS, _RANKINGS = 12, 512
"""Number of words from a document's text that replace a missing title; maximum number of rankings held in memory."""

Script = Callable[[Task, int], Sequence[str]]
"""Maps (task, step number from 0) to the texts that answer the step."""


class CandidateRanking:
    """Ranks the candidates of a choice by BM25 over their titles and texts, with the question as the query.

    Candidates without positions, such as the passages of a search, keep their order.
    """

    def __init__(self) -> None:
        self._rankings: dict[tuple[str, str, int], list[str]] = {}

    def first(self, task: Task, choice: Choice) -> str:
        """Return the id of the best candidate that is not yet picked."""
        left = {one.id: one for one in choice.candidates if one is not STOP}
        if all(one.position is None for one in left.values()):
            return next(iter(left))
        candidates = {
            one.id: one for one in (*choice.candidates, *choice.picked) if one is not STOP
        }
        key = task.id, choice.predictor, hash(frozenset(candidates))
        if key not in self._rankings:
            query = str(choice.context.get("question") or task.text)
            documents = [Document(one.id, one.title, one.text) for one in candidates.values()]
            self._rankings[key] = rank(query, documents)
        if len(self._rankings) > _RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return next(id for id in self._rankings[key] if id in left)


@dataclass
class ScriptedPolicy:
    """An `Actor` that answers the steps of a program by a rule instead of an LM.

    At a choice, the rule picks the first candidate in ``wanted``. If there is none, it picks a candidate without text,
    which adds nothing to the question, or else the best candidate (`CandidateRanking`).
    """

    formatter: Formatter
    script: Script
    wanted: Callable[[Task], Sequence[str]] | None = None
    _rank: CandidateRanking = field(default_factory=CandidateRanking, init=False)

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]:
        if need.choice is not None:
            left = {one.id: one.text for one in need.choice.candidates if one is not STOP}
            wanted = [id for id in (self.wanted(task) if self.wanted else ()) if id in left]
            empty = [id for id, text in left.items() if not text]
            chosen = (wanted or empty or [self._rank.first(task, need.choice)])[0]
            return LMCall(
                need.predictor, need.inputs, (), None, {"id": chosen}
            ), self.formatter.step(need, chosen)
        outputs = answer_fields(need.predictor, need.call.signature, self.script(task, step))
        return LMCall(need.predictor, need.inputs, (), None, outputs), self.formatter.scripted(
            need, outputs
        )


def rank(query: str, documents: list[Document]) -> list[str]:
    """Return document ids in BM25's order, followed by documents that share no word with the query, in input order."""
    try:
        [ranking] = BM25.build(Corpus(documents)).search([query], len(documents))
    except RetrievalError:  # no document has any words
        ranking = ()
    return list(
        dict.fromkeys(
            [*(passage.doc_id for passage in ranking), *(one.doc_id for one in documents)]
        )
    )


@dataclass(frozen=True)
class HydeActor:
    """An `Actor` that answers the steps of a program by HyDE (https://arxiv.org/abs/2212.10496).

    The query is a passage that the policy writes to answer the question. If it writes nothing, the question is used.
    The paper searches with the passage's embedding; the run's retriever searches with the passage's text.
    """

    policy: Policy
    decoding: Decoding

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]:
        prompt = f"Write a short passage of an encyclopedia that answers the question.\nQuestion: {task.text}\nPassage:"
        messages = ({"role": "user", "content": prompt},)
        decoding = replace(self.decoding, max_tokens=max(self.decoding.max_tokens, _PASSAGE_TOKENS))
        [completion] = await self.policy.complete(
            decoding.request(need, messages, task.id, step, "hyde", index)
        )
        passage = " ".join(completion.text.split()) or task.text
        outputs = answer_fields(need.predictor, need.call.signature, (passage,))
        n_tokens = completion.n_prompt_tokens + completion.n_completion_tokens
        call = LMCall(
            need.predictor, need.inputs, messages, completion.text, outputs, n_tokens=n_tokens
        )
        return call, Step(need.call, [outputs])


def hyde_note(policy: str, rows: Sequence[ScoredHop]) -> str:
    """Describe HyDE's queries for the report, because a small policy may not write passages at all."""
    lengths = [len(row.completion.split()) for row in rows if row.completion is not None]
    mean = sum(lengths) / max(1, len(lengths))
    return f"hyde: the query was the text that {policy} wrote when asked for a passage; mean length {mean:.0f} words"


def raw_question(task: Task, step: int) -> Sequence[str]:
    """Return the question at every step."""
    return (task.text,)


def marked_question(task: Task, step: int) -> Sequence[str]:
    """Return the question, prefixed with a word that marks the step for `query_places`."""
    return (f"answerofstep{step}end {task.text}",)


def query_places(rollout: Rollout) -> dict[int, int]:
    """Map each step of a `marked_question` rollout to the index of the first query that contains the step's output."""
    places: dict[int, int] = {}
    for query in (query for hop in rollout.hops for query in hop.queries):
        index = len(set(places.values()))
        for step in re.findall(r"answerofstep(\d+)end", query, re.IGNORECASE):
            places.setdefault(int(step), index)
    return places


def oracle_titles(
    corpus: Mapping[str, Document], places: Mapping[str, Mapping[int, int]]
) -> Script:
    """Return a script that writes the gold titles in order, one per query; the last query has all remaining titles.

    Any further query repeats the last title. ``places`` maps task ids to the results of `query_places`.
    """

    def script(task: Task, step: int) -> Sequence[str]:
        gold = [document for doc_id in task.gold if (document := find(corpus, doc_id))]
        titles = [d.title.strip() or " ".join(d.text.split()[:_HEAD_WORDS]) for d in gold] or [
            task.text
        ]
        index_of = places.get(task.id, {})
        n_queries = len(set(index_of.values()))
        index = index_of.get(step, n_queries)
        return titles[index : None if index >= n_queries - 1 else index + 1] or titles[-1:]

    return script


def one_search(retriever: Retriever, tasks: Sequence[Task], k: int) -> Iterator[Rollout]:
    """Yield a rollout per task: one search with its question, for programs with other outputs than text."""
    for task, ranking in zip(
        tasks, retriever.search([task.text for task in tasks], k), strict=True
    ):
        yield Rollout(task.id, (Hop((task.text,), ranking),), True)


def special_fields(predictor: str, signature: type[dspy.Signature] | None) -> list[str]:
    """Describe the outputs that are not texts, such as the tool name in `dspy.ReAct`."""
    fields = (
        {}
        if signature is None
        else {name: info.annotation for name, info in signature.output_fields.items()}
    )
    return [
        f"{predictor}.{name} is {kind}"
        for name, kind in fields.items()
        if kind not in (str, list[str])
    ]


def answer_fields(
    predictor: str, signature: type[dspy.Signature] | None, texts: Sequence[str]
) -> dict[str, Any]:
    """Return outputs with ``texts`` in every list[str] field, joined in str fields; ConfigError for other types."""
    fields = (
        {}
        if signature is None
        else {name: info.annotation for name, info in signature.output_fields.items()}
    )
    special = special_fields(predictor, signature)
    if special or not fields:
        raise ConfigError(
            "systems: rm3, oracle-titles and hyde need predictors with only str or list[str] fields, but "
            f"{special[0] if special else f'{predictor} has no output fields'}; remove these systems from `systems`"
        )
    return {name: " ".join(texts) if kind is str else list(texts) for name, kind in fields.items()}


def rm3_retriever(retriever: Retriever) -> Retriever:
    """Wrap the run's retriever with RM3; ConfigError if the retriever is not BM25."""
    from leret.retrieval.engines.rm3 import RM3

    try:
        return RM3(retriever)
    except RetrievalError as error:
        raise ConfigError(
            f"systems: rm3 cannot be evaluated ({error}); remove rm3 from `systems`"
        ) from error
