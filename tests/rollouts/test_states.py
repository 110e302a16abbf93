import signal
from collections import Counter
from itertools import count

import dspy
import pytest
from scipy.stats import chisquare

import leret
from leret.core.types import Task
from leret.policies.base import Completion
from leret.programs.adapters import CompactAdapter
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.rollouts.selection import select_next
from leret.rollouts.states import completion_of
from tests.sampling.fakes import DOCS, FakePolicy, FakeRetriever, made, questions
from tests.sampling.test_scheduler import content, sample


def test_a_retriever_that_was_away_costs_no_completion_again(tmp_path, replay, formatter):
    sample(tmp_path / "whole", replay, formatter)
    broken = FakeRetriever(broken=["alpha"])  # one query takes its whole batch with it
    assert sample(tmp_path / "db", replay, formatter, retriever=broken, concurrency=1).failures["retrieval"] > 0
    had = {s.seed for group in content(tmp_path / "db")[0] for s in group.samples if s.completion is not None}
    policy = FakePolicy()
    sample(tmp_path / "db", replay, formatter, policy)
    assert content(tmp_path / "db") == content(tmp_path / "whole")
    assert not had & {seed for request in policy.requests for seed in request.seeds}


class TwoPicks(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write_query = dspy.Predict("question -> query")
        self.pick = leret.Pick(stop=True, retrieves=True)

    def forward(self, question):
        topic, picked = self.write_query(question=question).query, []
        chunks = [{"id": word, "text": text} for word, text in DOCS.items()]
        while len(picked) < 2 and (one := self.pick(chunks, picked, question=question, topic=topic)):
            picked.append(one)
        return dspy.Prediction(picked=picked)


class FakePicker(FakePolicy):
    def _one(self, request, seed):
        if request.choice is None:
            return super()._one(request, seed)
        place = seed % len(request.choice.candidates)
        return Completion(request.choice.candidates[place].id, "stop", 0, 0, logprobs=(-1.0,), value=place / 2)


def test_choices_are_sampled_scored_and_resumed_like_completions(tmp_path):
    replay = Replay(TwoPicks(), CompactAdapter())
    parts = replay, Formatter(replay)
    whole, again, number = FakePicker(), FakePicker(), count()
    stop = FakePicker(fail=lambda request: next(number) == 9 and signal.raise_signal(signal.SIGINT))
    sample(tmp_path / "whole", *parts, whole)
    with pytest.raises(KeyboardInterrupt):
        sample(tmp_path / "db", *parts, stop)
    sample(tmp_path / "db", *parts, again)
    groups, visits = content(tmp_path / "db")
    assert (groups, visits) == content(tmp_path / "whole")
    assert 0 < len(again.requests) < len(whole.requests)
    picks = [group for group in groups if group.state.predictor == "pick"]
    assert {(s.prompt, s.index) for g in picks for s in g.samples} == {("0", i) for i in range(4)}  # two prompts' worth
    [golds] = [q.gold for q in questions() if q.id == picks[0].state.task_id]
    for one in (one for group in picks for one in group.samples):
        assert one.outputs == {"id": one.completion}
        assert one.components["logp"] == -1.0
        assert one.components["q"] in {i / 2 for i in range(7)}
        assert one.completion == "[stop]" or one.completion in one.doc_ids
    first = [s for s in picks[0].samples if picks[0].state.step == 1]
    assert all((s.reward > 0) == (s.completion in golds) for s in first)


def test_a_stored_completion_keeps_its_tokens_and_its_value():
    choice = made("a", components={"q": 0.5, "logp": -2.0})
    assert completion_of(choice) == Completion("a", "stop", 0, 0, logprobs=(-2.0,), value=0.5)
    text = made("a", token_ids=(7, 2), logprobs=(-2.0, 0.0))
    assert completion_of(text) == Completion("a", "stop", 0, 0, (7, 2), (-2.0, 0.0))


TASK = Task.question("q", "?", gold=("d1", "d2"))


def samples_of(doc_ids=("x", "d1"), **rewards):
    return [made(name, reward, doc_ids=doc_ids) for name, reward in rewards.items()]


def drawn(samples, n=1):
    chosen = [select_next(samples, TASK, 0, f"s{i}") for i in range(n)]
    return [sample and sample.id for sample in chosen]


@pytest.mark.parametrize("reward", [1.0, -3.5, 7.0])
def test_solved_samples_do_not_go_on_whatever_their_reward(reward):
    done = samples_of(("d2", "d1"), done=reward)
    assert set(drawn([*done, *samples_of(open=0.0)], 20)) == {"open"}
    assert [drawn(samples) for samples in (done, samples_of(broken=None), [])] == [[None]] * 3
    assert drawn(samples_of(a=0.0)) == drawn(samples_of(a=-3.5)) == ["a"]


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ({"a": 0.5, "b": 0.25, "c": 0.5, "d": 0.0}, {"a": 0.5, "b": 0.25, "c": 0.5}),
        ({"a": -3.5, "b": -1.0, "c": 40.0}, {"b": 2.5, "c": 44.0}),
    ],
)
def test_a_level_is_drawn_by_its_reward_above_zero_or_the_least_with_half_more_for_the_highest(rewards, weights):
    counts, total = Counter(drawn(samples_of(**rewards), 4000)), sum(weights.values())
    assert set(counts) == set(weights)
    expected = [4000 * weight / total for weight in weights.values()]
    assert chisquare([counts[name] for name in weights], expected).pvalue > 0.001
