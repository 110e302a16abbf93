import json
import re

import pytest

from leret.policies.base import Completion
from leret.sampling import trial
from leret.sampling.trial import TEMPERATURES, try_formats
from tests.first_steps import succeeds
from tests.sampling.fakes import FakePolicy, policy_is, recipe_of


class Follower(FakePolicy):
    """Repeats the question where the prompt ends with ``beginning``; elsewhere writes what nothing parses."""

    def __init__(self, beginning, n_tokens_at_1=4):
        super().__init__()
        self.beginning, self.n_tokens_at_1 = beginning, n_tokens_at_1

    def _one(self, request, seed):
        last = request.messages[-1]
        question = re.search(r"what follows (\w+)", str(request.messages))[1]
        if last["role"] == "assistant" and last["content"] == self.beginning:
            return Completion(question, "stop", 9, self.n_tokens_at_1 if request.temperature == 1 else 4)
        if last["role"] == "assistant" or "[[ ##" not in last["content"]:
            return Completion("nothing", "length", 9, request.max_tokens)
        return Completion("The answer is:\n[]", "stop", 9, 6)


@pytest.fixture
def cache(tmp_path, in_data):
    return tmp_path / "cache"


def test_the_format_with_the_highest_reward_is_the_best(cache):
    with policy_is(Follower('{\n  "query": "')):
        report = try_formats(recipe_of(), cache)
    assert report.best.name == "json, prefilled"
    assert len(report.best.searches[0.0]) == 30
    assert [report.best.measured(t).parsed for t in TEMPERATURES] == [1.0, 1.0]
    assert report.best.max_tokens == 32
    by_name = {tried.name: tried for tried in report.formats}
    assert (by_name["chat"].measured(0.0).parsed, set(by_name["chat"].searches)) == (0.0, {0.0})
    assert report.best.measured(0.0).reward > by_name["compact"].measured(0.0).reward
    assert by_name["compact"].measured(0.0).cut == 1.0


def test_a_model_that_parses_nothing_has_no_best_format(cache):
    policy = FakePolicy(junk=1.0)
    with policy_is(policy):
        report = try_formats(recipe_of(), cache)
    assert report.best is None
    assert [len(tried.samples(0.0)) for tried in report.formats] == [trial.N_FIRST] * 6
    assert not any(tried.samples(1.0) for tried in report.formats)


def test_a_lower_temperature_is_chosen_for_a_model_that_does_not_end_at_1(cache):
    with policy_is(Follower("query:", n_tokens_at_1=128)):
        best = try_formats(recipe_of(), cache).best
    assert (best.temperature, best.works, best.max_tokens, len(best.searches[0.7])) == (0.7, True, 32, 30)
    assert best.measured(1.0).cut == 1.0
    assert "--set policy.max_tokens=32 --set policy.temperature=0.7" in best.flags


def test_the_command_prints_a_row_per_format_and_the_flags(cache):
    recipe = recipe_of(policy={"model": "demo"}).model_dump(mode="json")
    (cache.parent / "r.yaml").write_text(json.dumps(recipe))
    with policy_is(Follower("query:")):
        out = succeeds("sample", "r.yaml", "--trial", "--set", "data.limit=12")
    assert "json, prefilled" in out
    assert "--set program.adapter.prefill=true --set policy.max_tokens=32 --set policy.temperature=1.0" in out
