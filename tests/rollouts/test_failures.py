import pytest

from leret.core.errors import PolicyError, RetrievalError
from leret.core.types import Failure
from leret.rollouts.failures import SamplingStats, refuse_failures, refuse_unparsed


def test_failures_refuse_above_the_rate_or_where_nothing_else_came():
    def refuse(n_failed, n_samples, n_rewarded, last=False):
        stats = SamplingStats(samples=n_samples, n_rewarded=n_rewarded)
        for _ in range(n_failed):
            stats.fail(Failure("retrieval", "the index is away"))
        refuse_failures(stats, 0.1, 1.0, last)

    refuse(5, 50, 45)
    refuse(4, 4, 0)
    with pytest.raises(RetrievalError, match=r"6 failures in 50 samples.*max_error_rate = 0\.1.*the index is away"):
        refuse(6, 50, 44)
    with pytest.raises(RetrievalError, match="and no rewards"):
        refuse(4, 4, 0, last=True)


def test_few_unparsed_samples_refuse_only_where_all_are():
    unparsed = [Failure("parse", "x")]
    for n_unparsed, n_samples, rate in ((4, 4, 0.5), (5, 5, 1), (48, 49, 0.5), (25, 50, 0.5)):
        refuse_unparsed(unparsed, n_unparsed, n_samples, rate)
    for n_unparsed, n_samples in ((5, 5), (26, 50)):
        with pytest.raises(PolicyError, match="name a new run directory"):
            refuse_unparsed(unparsed, n_unparsed, n_samples, 0.5)
