"""Systems without an LM: rules that answer the program's steps, RM3, and the fusion of what other systems found.

Rules go through the program itself, so that they see its cut-offs, its number of hops and its `exclude_seen` exactly as
a policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dspy

from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import Document, Failure, Hop, Passage, Rollout, Task
from leret.evaluation.results import ScoredHop, first_runs
from leret.programs.prompts import Formatter
from leret.programs.replay import NeedsCompletion, Step
from leret.retrieval.base import Retriever
from leret.retrieval.fusion import reciprocal_rank_fusion

_HEAD_WORDS = 12
"""Words of a document without a title that stand for it."""

Script = Callable[[Task, int], Sequence[str]]
"""(task, step from 0) to the texts to search for at that step."""


class ScriptedPolicy:
    """Answers the steps of a program by a rule instead of an LM; an `Actor`."""

    def __init__(self, formatter: Formatter, script: Script) -> None:
        self._formatter = formatter
        self._script = script

    async def act(self, task: Task, need: NeedsCompletion, step: int, index: int) -> tuple[Hop, Step]:
        """A hop without a completion."""
        outputs = answer_fields(self._formatter.signature(need.predictor), self._script(task, step))
        hop = Hop(need.predictor, need.inputs, (), None, outputs, need.ranking)
        return hop, self._formatter.scripted(need, outputs)


def raw_question(task: Task, step: int) -> Sequence[str]:
    """The question itself, at every hop."""
    return (task.text,)


def oracle_titles(corpus: Mapping[str, Document], n_steps: Mapping[str, int]) -> Script:
    """The gold titles in their order, one a hop; the last hop asks for all that remain.

    A document without a title is asked for by its first words. A hop beyond the last title asks for that one again.
    ``n_steps`` are the program's by task id.
    """

    def script(task: Task, step: int) -> Sequence[str]:
        gold = [corpus[doc_id] for doc_id in task.gold if doc_id in corpus]
        titles = [d.title.strip() or " ".join(d.text.split()[:_HEAD_WORDS]) for d in gold] or [task.text]
        if step >= n_steps.get(task.id, 1) - 1:
            return titles[step:] or titles[-1:]
        return (titles[min(step, len(titles) - 1)],)

    return script


def answer_fields(signature: type[dspy.Signature], texts: Sequence[str]) -> dict[str, Any]:
    """Outputs of a predictor that hold ``texts``: a list where the field is one, else one line."""
    outputs: dict[str, Any] = {}
    for name, info in signature.output_fields.items():
        if info.annotation is str:
            outputs[name] = " ".join(texts)
        elif info.annotation == list[str]:
            outputs[name] = list(texts)
        else:
            why = f"need a program that writes texts, but {signature.__name__}.{name} is {info.annotation}"
            raise ConfigError(f"systems: raw-question and oracle-titles {why}; leave them out of `systems`")
    return outputs


def rm3_retriever(retriever: Retriever) -> Retriever:
    """RM3 over the run's retriever, which has to be BM25."""
    from leret.retrieval.engines.rm3 import RM3

    try:
        return RM3(retriever)
    except RetrievalError as error:
        raise ConfigError(f"systems: rm3 cannot be evaluated: {error}; leave it out of `systems`") from error


def fuse(parts: Sequence[Sequence[ScoredHop]], questions: Sequence[Task]) -> Iterator[Rollout]:
    """Rollouts whose ranking at each hop fuses those of other systems, by reciprocal rank.

    A system that ended earlier keeps its last ranking at later hops. Of several samples, the first is taken. Where a
    system failed on a question, so does its rollout.
    """
    tables = [first_runs(rows) for rows in parts]
    for question in questions:
        runs = [table.get(question.id, []) for table in tables]
        failed = next((row.failure for run in runs for row in run if row.failure is not None), None)
        if failed is not None or not all(runs):
            kind, _, message = (failed or "fused: one of the systems has no result for it").partition(": ")
            yield Rollout(question.id, (), False, Failure(kind, message))
            continue
        n_hops = max(len(run) for run in runs)
        at_hop = [[run[min(hop, len(run) - 1)] for run in runs] for hop in range(n_hops)]
        yield Rollout(question.id, tuple(_hop(rows) for rows in at_hop), True)


def _hop(rows: Sequence[ScoredHop]) -> Hop:
    found = [[Passage(doc_id, "", "", 0.0) for doc_id in row.doc_ids] for row in rows]
    query = " + ".join(row.query for row in rows if row.query)
    ranking = reciprocal_rank_fusion([tuple(ranking) for ranking in found], [1.0] * len(found))
    return Hop("", {}, (), None, {"query": query} if query else None, ranking)
