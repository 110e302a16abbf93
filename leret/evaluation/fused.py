"""Baselines that need no LM of their own: RM3, and the fusion of what other systems found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import Failure, Hop, Passage, Rollout, Task
from leret.evaluation.results import ScoredHop
from leret.retrieval.base import Retriever
from leret.retrieval.fusion import reciprocal_rank_fusion


def expanding(retriever: Retriever) -> Retriever:
    """RM3 over the run's retriever.

    Raises:
        ConfigError: it is not BM25.
    """
    from leret.retrieval.engines.rm3 import RM3

    try:
        return RM3(retriever)
    except RetrievalError as error:
        raise ConfigError(f"systems: rm3 cannot be evaluated: {error}; leave it out of `systems`") from error


def fuse(parts: Sequence[Sequence[ScoredHop]], questions: Sequence[Task]) -> Iterator[Rollout]:
    """Rollouts whose ranking at each hop fuses those of other systems, by reciprocal rank.

    A system that ended earlier keeps its last ranking at later hops. Of several samples, the first is taken.

    Args:
        parts: rows of each system.
        questions: one rollout each, in their order; where a system failed, so does the rollout.
    """
    tables = [_by_question(rows) for rows in parts]
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


def _by_question(rows: Sequence[ScoredHop]) -> dict[str, list[ScoredHop]]:
    found: dict[str, list[ScoredHop]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.hop):
        if row.sample == 0:
            found[row.question_id].append(row)
    return found


def _hop(rows: Sequence[ScoredHop]) -> Hop:
    found = [[Passage(doc_id, "", "", 0.0) for doc_id in row.doc_ids] for row in rows]
    query = " + ".join(row.query for row in rows if row.query)
    ranking = reciprocal_rank_fusion([tuple(ranking) for ranking in found], [1.0] * len(found))
    return Hop("", {}, (), None, {"query": query} if query else None, ranking)
