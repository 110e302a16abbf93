import asyncio
import json
from collections import Counter, defaultdict
from contextlib import closing

import dspy
import pytest

from leret.config.sampling import SamplingSettings
from leret.core.errors import ConfigError, PolicyError, ProgramError
from leret.core.runs import Run
from leret.core.types import Task
from leret.policies.base import Completion
from leret.programs.adapters import CompactAdapter
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.runner import ProgramRunner
from leret.programs.search import Found, Search
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.states import with_credit
from leret.sampling.stage import sample_tasks
from leret.sampling.store.store import Store
from tests.optimize.conftest import Asking
from tests.programs.zoo import Agent
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions

FEW = Prompt("1", {"write": [{"question": "who", "query": "find who"}]})
SETTINGS = SamplingSettings(max_error_rate=1.0, max_unparsed_rate=1.0, concurrency=5)


class Answering(dspy.Module):
    def __init__(self):
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.write = dspy.Predict("question, plan -> query")
        self.answer = dspy.Predict("question, context: list[str] -> answer")
        self.search = Search(k=2)

    def forward(self, question):
        found = self.search(self.write(question=question, plan=self.plan(question=question).plan).query, Found())
        return self.answer(question=question, context=found.passages)


class Recorded(FakePolicy):
    def __init__(self, name="fake", mute=lambda request: False, **values):
        super().__init__(**values)
        self.name, self.digest, self.mute = name, f"{name}-policy", mute

    def _one(self, request, seed):
        return Completion("", "stop", 1, 0) if self.mute(request) else super()._one(request, seed)

    @property
    def asked(self):
        return Counter(step_of(request) for request in self.requests for _ in request.seeds)


def step_of(request):
    last = request.messages[-1]["content"]
    return "answer" if "context:" in last else "write" if "plan:" in last else "plan"


def is_alpha(outcome):
    return float("alpha" in outcome.prediction.answer)


def sample(path, role, program=None, tasks=None, prompts=(ZERO_SHOT, FEW), run=None, n=2, retriever=None, **plan):
    roles = role if isinstance(role, dict) else defaultdict(lambda: role if isinstance(role, Role) else Role(role))
    rewards = {key: scoring(plan[key], key) for key in ("reward", "final") if plan.get(key)}
    made = SamplingPlan(prompts, n, 7, 1.0, 1.0, 8, role=lambda need: roles[need.predictor], **{**plan, **rewards})
    with Store(path) as store, closing(SearchBatcher(retriever or FakeRetriever())) as searches:
        own = program or Answering()
        runner = ProgramRunner.over(own.deepcopy(), CompactAdapter(), searches)

        async def go():
            asked = tasks or questions(6)
            return await sample_tasks(asked, runner, own, await with_credit(made, runner, asked, run), store, SETTINGS)

        return asyncio.run(go())


def groups_of(path, predictor=None):
    with Store(path, read_only=True) as store:
        return [group for group in store.groups() if predictor in {None, group.state.predictor}]


def samples_of(path, predictor=None):
    return [sample for group in groups_of(path, predictor) for sample in group.samples]


def test_a_predictor_that_a_search_follows_takes_step_and_the_others_final(tmp_path):
    ends = []
    stats = sample(tmp_path / "db", Recorded(), final=lambda end: ends.append(end) or is_alpha(end))
    parts = [{tuple(s.components) for s in samples_of(tmp_path / "db", name)} for name in ("plan", "write", "answer")]
    assert parts == [{("recall", "ap", "final")}, {("ap", "recall")}, {("recall", "ap", "final")}]
    assert all(s.reward == s.components["final"] for s in samples_of(tmp_path / "db", "answer"))
    assert all(s.reward == s.components["ap"] for s in samples_of(tmp_path / "db", "write"))
    assert stats.notes == []
    assert {end.n_steps for end in ends} == {3}
    assert all(end.outputs == {"answer": end.prediction.answer} for end in ends)
    assert any(end.ranking for end in ends)


def test_without_a_final_reward_the_others_are_not_sampled_and_named_also_in_the_run(tmp_path):
    run = Run.create(tmp_path / "run")
    stats = sample(run.store, Recorded(), run=run)
    sizes = {(group.state.predictor, len(group.samples)) for group in groups_of(run.store)}
    assert sizes - {("answer", 1)} == {("plan", 1), ("write", 4)}
    assert [note.split(" ", 1)[0] for note in stats.notes] == ["plan", "answer"]
    assert run.manifest.searched == {"answer": False, "plan": False, "write": True}
    again = Recorded()
    sample(run.store, again, run=run)
    assert not again.requests


def only(policy, name, credit="auto"):
    return {other: Role(policy, other == name, credit) for other in ("plan", "write", "answer")}


def test_each_sample_that_is_not_the_end_is_run_on_n_times(tmp_path):
    policy, n = Recorded(), 3
    sample(tmp_path / "db", only(policy, "write", "final"), final=is_alpha, n_continuations=n)
    writes, answers = groups_of(tmp_path / "db", "write"), groups_of(tmp_path / "db", "answer")
    n_places = sum(len({s.outputs["query"] for s in group.samples}) for group in writes)
    assert policy.asked["answer"] == n * n_places + len(answers)  # equal queries lead to one place
    rewards = [s.reward for group in writes for s in group.samples]
    assert {round(reward * n) / n for reward in rewards} == set(rewards)
    assert len(set(rewards)) > 1

    last = Recorded()
    sample(tmp_path / "last", only(last, "answer", "final"), final=is_alpha, n_continuations=n)
    assert last.asked == {"plan": 6, "write": 6, "answer": 24}
    for answer in samples_of(tmp_path / "last", "answer"):
        assert answer.reward == float("alpha" in answer.outputs["answer"])


def test_an_outage_on_the_way_is_no_score_and_costs_no_completion_again(tmp_path):
    roles = Role(Recorded(), credit="final")
    sample(tmp_path / "whole", roles, final=is_alpha, n_continuations=2)
    away = Recorded(fail=lambda request: step_of(request) == "answer")
    with pytest.raises(PolicyError, match="the server is away"):
        sample(tmp_path / "db", Role(away, credit="final"), final=is_alpha, n_continuations=2)
    assert {(s.reward, s.failure.kind) for s in samples_of(tmp_path / "db")} == {(None, "policy")}
    had = {s.seed for s in samples_of(tmp_path / "db") if s.completion is not None}
    policy = Recorded()
    sample(tmp_path / "db", Role(policy, credit="final"), final=is_alpha, n_continuations=2)
    assert had
    assert not had & {seed for request in policy.requests for seed in request.seeds}
    assert groups_of(tmp_path / "db") == groups_of(tmp_path / "whole")


class Oracle(FakeRetriever):
    def _one(self, query, k):
        return super()._one("alpha beta", k)


SOLVED = [Task.question(f"q{i}", f"number {i}", gold=("alpha", "beta")) for i in range(2)]


@pytest.mark.parametrize(("final", "predictors"), [(None, {"plan", "write"}), (is_alpha, {"plan", "write", "answer"})])
def test_a_path_ends_where_all_is_found_unless_the_end_is_learnt_too(tmp_path, final, predictors):
    sample(tmp_path / "db", Recorded(), tasks=SOLVED, retriever=Oracle(), final=final)
    assert {group.state.predictor for group in groups_of(tmp_path / "db")} == predictors


def test_a_credit_without_a_value_is_refused(tmp_path):
    tasks = [Task.question(f"q{i}", f"number {i}") for i in range(3)]
    sample(tmp_path / "db", Role(Recorded(), credit="final"), tasks=tasks, final=is_alpha)
    assert {tuple(s.components) for s in samples_of(tmp_path / "db")} == {("final",)}
    with pytest.raises(ConfigError, match=r"no value for question q.*sampling\.credit: final"):
        sample(tmp_path / "steps", Role(Recorded(), credit="step"), tasks=tasks)
    with pytest.raises(ConfigError, match="needs a final reward"):
        sample(tmp_path / "ends", Role(Recorded(), credit="final"))
    with pytest.raises(ConfigError, match="final reward has no value for task q"):
        sample(tmp_path / "ends", Role(Recorded(), credit="final"), final=lambda outcome: None)


def test_a_program_without_a_search_is_refused_or_sampled_by_its_end(tmp_path):
    says = r"Asking made no search.*leret\.search_tool\(fn\), or set sampling\.credit: final"
    for credit, final in (("auto", None), ("both", is_alpha)):
        with pytest.raises(ProgramError, match=says):
            sample(tmp_path / "db", Role(Recorded(), credit=credit), Asking(), final=final)
    sample(tmp_path / "end", Recorded(), Asking(), final=is_alpha)
    assert len(samples_of(tmp_path / "end")) == 2 * 6 * 4


class Acting(Recorded):
    def _one(self, request, seed):
        if "next_tool_args" not in str(request.messages):
            return super()._one(request, seed)
        args = {"query": ("alpha", "beta", "gamma", "delta")[seed // 2 % 4]} if seed % 2 else {}
        step = {"next_thought": "so", "next_tool_name": "look_up" if seed % 2 else "finish", "next_tool_args": args}
        return Completion(json.dumps(step), "stop", 1, 1)


def test_auto_credit_is_both_where_the_policy_decides_when_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.CompactAdapter", dspy.JSONAdapter)
    stats = sample(tmp_path / "db", Acting(), Agent(), tasks=questions(1), prompts=(ZERO_SHOT,), n=4)
    acts = [s for s in samples_of(tmp_path / "db", "agent.react") if s.reward is not None]
    assert acts
    assert {frozenset(s.components) - {"recall", "ap"} for s in acts} == {frozenset(("step", "final"))}
    [note] = [note for note in stats.notes if note.startswith("agent.react")]
    assert "credit is both" in note
