"""The registry: names, cut-offs, and what adds a kind."""

import pytest

from leret import rewards
from leret.core.errors import ConfigError
from leret.core.types import Hop, Outcome, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, all_measures
from leret.rewards import REWARDS, reward

TASK = Task.question("q", "?", gold=("a", "b"))
RANKING = tuple(Passage(i, "", "", 0.0) for i in "xab")


def length(outcome):
    """The file of a new reward: any real number, and None where it does not apply."""
    return None if not outcome.ranking else -2.5 * len(outcome.ranking)


def test_a_reward_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "length", length)
    assert reward("length")(Outcome(TASK, ranking=RANKING)) == -7.5
    hops = [Hop("write", {}, (), "x", {"query": "x"}, ranking) for ranking in (RANKING, ())]
    found, nothing = Scorer(all_measures(["length"]), [TASK], {}).rows(Rollout("q", tuple(hops), True))
    assert (found.measures["length"], "length" in nothing.measures) == (-7.5, False)
    with pytest.raises(ConfigError, match="length@3"):
        reward("length@3")  # it takes no cut-off


def test_a_cut_off_is_part_of_the_name():
    values = [
        reward(name)(Outcome(TASK, ranking=RANKING)) for name in ("recall", "recall@2", "recall@1", "success@1", "rr@2")
    ]
    assert values == [1, 0.5, 0, 0, 0.5]


def test_a_task_without_gold_has_no_value():
    assert {value(Outcome(Task.question("q", "?"), ranking=RANKING)) for value in REWARDS.values()} == {None}


@pytest.mark.parametrize("name", ["map", "recall@", "recall@0", "recall@x", "@3", "recall@²", "recall@٣"])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"sampling.reward: unknown measure .*available: recall, ap"):
        reward(name, "sampling.reward")
