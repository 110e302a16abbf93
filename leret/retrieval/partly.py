"""A batch of which some queries were answered and others were not: what is known is not thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leret.errors import RetrievalError
from leret.types import Ranking

__all__ = ["PartlyAnsweredError", "settled"]


class PartlyAnsweredError(RetrievalError):
    """The engine could not answer some queries of a batch.

    Args:
        failure: of one of them.
        answered: the rankings of the others, by query.
    """

    def __init__(self, failure: RetrievalError, answered: Mapping[str, Ranking]) -> None:
        super().__init__(str(failure))
        self.exit_code = failure.exit_code
        self.answered = dict(answered)


def settled(queries: Sequence[str], outcomes: Sequence[Ranking | RetrievalError]) -> list[Ranking]:
    """The rankings of a batch, where there is one for each query.

    Args:
        queries: of the batch.
        outcomes: of each.

    Raises:
        PartlyAnsweredError: some failed; the first failure, with what is known of the others.
    """
    rankings = [outcome for outcome in outcomes if not isinstance(outcome, RetrievalError)]
    if len(rankings) == len(queries):
        return rankings
    pairs = list(zip(queries, outcomes, strict=True))
    failure = next(outcome for _, outcome in pairs if isinstance(outcome, RetrievalError))
    answered = {query: outcome for query, outcome in pairs if not isinstance(outcome, RetrievalError)}
    raise PartlyAnsweredError(failure, answered) from failure
