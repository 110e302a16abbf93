"""Baselines for policies: rules in place of the LM; RM3; and HyDE.

Rules answer the steps of the real program, so the program's cut-offs, hops and `exclude_seen` apply
to baselines too.
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
"""Minimum `max_tokens` for HyDE's passage; the policy's setting is meant for short queries."""

_HEAD_WORDS = 12
"""Number of words from a document's text that replace a missing title."""

_RANKINGS = 512
"""Maximum number of rankings held in memory."""

Script = Callable[[Task, int], Sequence[str]]
"""Maps (task, step number from 0) to the texts that answer the step."""


class CandidateRanking:
    """Ranks the candidates of a choice by BM25, with the question as the query.

    BM25 searches titles and texts. Candidates without positions, such as the passages of a search,
    keep their order.
    """

    def __init__(self) -> None:
        self._rankings: dict[tuple[str, str, int], list[str]] = {}

    def first(self, task: Task, choice: Choice) -> str:
        """Return the id of the best candidate that is not yet picked."""
        left = {item.id: item for item in choice.candidates if item is not STOP}
        if all(item.position is None for item in left.values()):
            return next(iter(left))
        candidates = dict(left)
        for item in choice.picked:
            if item is not STOP:
                candidates[item.id] = item
        key = task.id, choice.predictor, hash(frozenset(candidates))
        if key not in self._rankings:
            query = str(choice.context.get("question") or task.text)
            documents = [Document(item.id, item.title, item.text) for item in candidates.values()]
            self._rankings[key] = rank(query, documents)
        if len(self._rankings) > _RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return next(id for id in self._rankings[key] if id in left)


@dataclass
class ScriptedPolicy:
    """An `Actor` that answers the steps of a program by a rule instead of an LM.

    At a choice, the rule picks a candidate without text, which adds nothing to the question, or
    else the best candidate (`CandidateRanking`). With ``picks_gold``, gold documents come first.
    """

    formatter: Formatter
    script: Script
    picks_gold: bool = False
    _rank: CandidateRanking = field(default_factory=CandidateRanking, init=False)

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]:
        if need.choice is not None:
            picked = self._pick(task, need.choice)
            call = LMCall(need.predictor, need.inputs, (), None, {"id": picked})
            return call, self.formatter.step(need, picked)
        outputs = answer_fields(need.predictor, need.call.signature, self.script(task, step))
        call = LMCall(need.predictor, need.inputs, (), None, outputs)
        return call, Step(need.call, [outputs])

    def _pick(self, task: Task, choice: Choice) -> str:
        left = {item.id: item.text for item in choice.candidates if item is not STOP}
        if self.picks_gold:
            for id in task.gold:
                if id in left:
                    return id
        for id, text in left.items():
            if not text:
                return id
        return self._rank.first(task, choice)


def rank(query: str, documents: list[Document]) -> list[str]:
    """Return document ids in BM25's order, then documents that share no word with the query."""
    ids = [document.doc_id for document in documents]
    try:
        [ranking] = BM25.build(Corpus(documents)).search([query], len(documents))
    except RetrievalError:  # no document has any words
        return list(dict.fromkeys(ids))
    return list(dict.fromkeys([*(passage.doc_id for passage in ranking), *ids]))


@dataclass(frozen=True)
class HydeActor:
    """An `Actor` that answers the steps of a program by HyDE (https://arxiv.org/abs/2212.10496).

    The query is a passage that the policy writes to answer the question. If it writes nothing, the
    question is used. The paper searches with the passage's embedding; the run's retriever searches
    with the passage's text.
    """

    policy: Policy
    decoding: Decoding

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]:
        instruction = "Write a short passage of an encyclopedia that answers the question."
        prompt = f"{instruction}\nQuestion: {task.text}\nPassage:"
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
    """Describe HyDE's queries for the report; a small policy may not write passages at all."""
    lengths = [len(row.completion.split()) for row in rows if row.completion is not None]
    mean = sum(lengths) / max(1, len(lengths))
    return (
        f"hyde: the query was the text that {policy} wrote when asked for a passage; "
        f"mean length {mean:.0f} words"
    )


def raw_question(task: Task, step: int) -> Sequence[str]:
    """Return the question at every step."""
    return (task.text,)


def marked_question(task: Task, step: int) -> Sequence[str]:
    """Return the question, prefixed with a word that marks the step for `query_places`."""
    return (f"answerofstep{step}end {task.text}",)


def query_places(rollout: Rollout) -> dict[int, int]:
    """Map each step of a `marked_question` rollout to the first query that contains its output."""
    first: dict[int, int] = {}
    for hop in rollout.hops:
        for query in hop.queries:
            index = len(set(first.values()))
            for step in re.findall(r"answerofstep(\d+)end", query, re.IGNORECASE):
                first.setdefault(int(step), index)
    return first


def oracle_titles(
    corpus: Mapping[str, Document], queries: Mapping[str, Mapping[int, int]]
) -> Script:
    """Return a script that writes the gold titles in order, one per query.

    The last query has all remaining titles, and any further query repeats the last title.
    ``queries`` maps task ids to the results of `query_places`.
    """

    def script(task: Task, step: int) -> Sequence[str]:
        titles = []
        for doc_id in task.gold:
            document = find(corpus, doc_id)
            if document:
                start = " ".join(document.text.split()[:_HEAD_WORDS])
                titles.append(document.title.strip() or start)
        if not titles:
            titles = [task.text]
        index_of = queries.get(task.id, {})
        n_queries = len(set(index_of.values()))
        index = index_of.get(step, n_queries)
        if index >= n_queries - 1:
            return titles[index:] or titles[-1:]
        return titles[index : index + 1] or titles[-1:]

    return script


def one_search(retriever: Retriever, tasks: Sequence[Task], k: int) -> Iterator[Rollout]:
    """Yield a rollout per task: one search with its question.

    It is for programs with other outputs than text.
    """
    for task, ranking in zip(
        tasks, retriever.search([task.text for task in tasks], k), strict=True
    ):
        yield Rollout(task.id, (Hop((task.text,), ranking),))


def special_fields(predictor: str, signature: type[dspy.Signature] | None) -> list[str]:
    """Describe the outputs that are not texts, such as the tool name in `dspy.ReAct`."""
    special = []
    for name, kind in _output_fields(signature).items():
        if kind not in (str, list[str]):
            special.append(f"{predictor}.{name} is {kind}")
    return special


def _output_fields(signature: type[dspy.Signature] | None) -> dict[str, Any]:
    """Map the outputs of a signature to their types."""
    if signature is None:
        return {}
    return {name: info.annotation for name, info in signature.output_fields.items()}


def answer_fields(
    predictor: str, signature: type[dspy.Signature] | None, texts: Sequence[str]
) -> dict[str, Any]:
    """Return outputs with ``texts`` in every list[str] field, joined in str fields.

    ConfigError for other types.
    """
    fields = _output_fields(signature)
    special = special_fields(predictor, signature)
    if not fields:
        special = [f"{predictor} has no output fields"]
    if special:
        raise ConfigError(
            "systems: rm3, oracle-titles and hyde need predictors with only str or list[str] "
            f"fields, but {special[0]}; remove these systems from `systems`"
        )
    outputs: dict[str, Any] = {}
    for name, kind in fields.items():
        outputs[name] = " ".join(texts) if kind is str else list(texts)
    return outputs


def rm3_retriever(retriever: Retriever) -> Retriever:
    """Wrap the run's retriever with RM3; ConfigError if the retriever is not BM25."""
    from leret.retrieval.engines.rm3 import RM3

    try:
        return RM3(retriever)
    except RetrievalError as error:
        raise ConfigError(
            f"systems: rm3 cannot be evaluated ({error}); remove rm3 from `systems`"
        ) from error
