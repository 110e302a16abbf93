import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leret.core.errors import ConfigError, DataError, PolicyError
from leret.core.runs import Run
from leret.datasets.splits import split_of
from leret.policies.base import Completion, PromptTooLongError
from leret.sampling.estimate import estimate
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store
from tests.sampling.fakes import (
    AWAY,
    ROOT,
    FakePolicy,
    blank,
    content,
    events_of,
    policy_is,
    preferences,
    questions,
    recipe_of,
    served,
)

TOO_LONG = PromptTooLongError("a prompt of 517 tokens does not fit")


def test_a_recipe_becomes_a_bank_a_store_and_preferences_once(run, made):
    report = sample(recipe_of(), run)
    assert report.questions == report.new_questions == 30
    assert report.samples == sum(len(group.samples) for group in content(run))
    assert report.pairs > 0
    assert list(report.prompts) == [path.stem for path in sorted(run.prompts.glob("*.json"))] == ["0", "1", "2"]
    assert run.manifest.sampling["data"]["corpus"] == str(Path("corpus.jsonl").resolve())
    assert set(run.manifest.digests) == {"corpus", "retriever", "program", "questions", "policy"}
    assert [event["event"] for event in events_of(run)] == ["started", "bank", "accounts", "built", "finished"]
    held_out = [task.id for task in questions(30) if split_of(task.id) == "test"]
    assert json.loads(run.held_out.read_text()) == held_out

    build_preferences(run, "best-worst")  # made by hand: they stay
    again = sample(recipe_of(), run)
    assert (again.already, again.new_samples, again.samples, again.pairs) == (True, 0, report.samples, report.pairs)
    assert run.manifest.preferences["strategy"] == "best-worst"
    assert len(made) == 1, "nothing was opened"
    assert sample(recipe_of(strategy="all"), run).pairs >= report.pairs  # another strategy asks nothing either
    run.held_out.unlink()  # no training may go on without it
    assert not sample(recipe_of(strategy="all"), run).already
    assert json.loads(run.held_out.read_text()) == held_out
    assert not [policy for policy in made[1:] if policy.requests]


def test_any_limit_goes_on_with_a_run_that_an_outage_stopped(run):
    recipe = {"prompts": 2, "bank": {"train_questions": 4, "dev_questions": 4, "candidates": 2, "max_demos": 1}}
    whole = Run.create(Path("whole"))
    prompts = sample(recipe_of(**recipe), whole).prompts
    away = FakePolicy(fail=lambda request: len(away.requests) > 80)
    with policy_is(away), pytest.raises(PolicyError, match=r"sampling\.max_error_rate = 0\.1"):
        sample(recipe_of(data={"limit": 30}, concurrency=1, **recipe), run)
    pairs = build_preferences(run)
    assert 0 < pairs.questions < 30

    closed = sample(recipe_of(data={"limit": pairs.questions}, **recipe), run)
    assert (closed.questions, closed.new_samples, closed.pairs) == (pairs.questions, 0, pairs.pairs)

    larger = sample(recipe_of(data={"limit": 30}, **recipe), run)
    assert (larger.questions, larger.new_questions, larger.prompts) == (30, 30 - pairs.questions, prompts)
    assert content(run) == content(whole)
    assert preferences(run) == preferences(whole)


def test_prompts_that_are_too_long_cost_their_samples_unless_most_are(run):
    def narrow(request):
        return len(request.messages) > 1 and "number 17" in request.messages[-1]["content"] and TOO_LONG

    with policy_is(FakePolicy(fail=narrow)):
        report = sample(recipe_of(), run)
    assert (report.questions, report.waiting, set(report.failures)) == (30, 0, {"prompt"})
    assert 0 < report.failures["prompt"] < report.samples / 2
    assert any(note.endswith("are too long for the policy") for note in report.notes)
    assert sample(recipe_of(), run).already
    assert check_store(run).faults == []

    stops = pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*517 tokens.*a new run directory")
    with policy_is(FakePolicy(fail=lambda request: TOO_LONG)), stops:
        sample(recipe_of(prompts=1), Run.create(Path("narrow")))


def test_what_cannot_be_sampled_is_refused(run, server):
    with pytest.raises(ConfigError, match=r"sampling\.token_ids: .*seeded sent no token ids.*token_ids: false"):
        sample(served(server, token_ids=True), Run.create(Path("none")))
    with pytest.raises(ConfigError, match="temperature 0"):  # all samples would be the same
        sample(recipe_of(policy={"temperature": 0}), run)
    Path("questions.jsonl").write_text('{"id": "q", "question": "who", "relevant_doc_ids": []}\n')
    with pytest.raises(DataError, match="to score against"):
        sample(recipe_of(), run)


def test_a_report_says_why_there_are_few_prompts_and_little_spread(run, monkeypatch):
    monkeypatch.setattr(FakePolicy, "_one", lambda self, request, seed: Completion("zzz", "stop", 1, 1))
    told = " | ".join(sample(recipe_of(), run).notes)
    assert "no run for making demos had a reward above 0" in told
    assert "only 0 of 60 states have samples with different rewards" in told
    assert "retriever.k is 2" in estimate(recipe_of(), run).notes[0]


def test_a_killed_run_equals_one_that_was_not():
    command = [sys.executable, "benchmarks/correctness/kills.py", "--kills", "1", "--questions", "12"]
    command += ["--faults", "0.3", "--samples", "1", "--timeout-s", "1", "--stall-s", "10"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode in {0, 1}, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["equal"], told["asked_twice"], len(told["at"]), bool(told["faults"])) == (True, 0, 1, True)
    assert 12 * 4 < told["requests"] <= 12 * 2 * 4


FILTERED = {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "content_filter"}]}


def test_errors_of_status_200_are_outages_and_are_asked_again(run, server):
    reward = {"parts": ["recall@1", "rr", "steps"], "mixer": "pca"}  # of all samples of a state
    whole, recipe = Run.create(Path("whole")), served(server, samples=4, reward=reward)
    sample(recipe, whole)
    lies = {"number 7": AWAY, "number 8": FILTERED}
    server.lie = lambda body: next((lie for asked, lie in lies.items() if asked in body["messages"][-1]["content"]), {})
    report = sample(recipe, run)
    assert (report.waiting, set(report.failures)) == (2, {"policy"})
    assert all(s.reward is None for g in content(run) for s in g.samples if s.failure)
    server.lie = lambda body: {}
    assert sample(recipe, run).waiting == 0
    assert content(run) == content(whole)
    assert preferences(run) == preferences(whole)


def test_a_run_whose_completions_do_not_parse_stops_and_shows_one(run, server):
    server.lie = blank(1.0)
    for prompts in (1, 3):  # 3: before a bank of failures is made
        says = r"completions do not parse.*: ' ' is .*Adapter reads.*`leret sample RECIPE --trial"
        with pytest.raises(PolicyError, match=says):
            sample(served(server, samples=1, prompts=prompts), Run.create(run.path / str(prompts)))
    raised = sample(served(server, samples=1, max_unparsed_rate=1.0), run)
    assert (raised.failures, raised.pairs) == ({"parse": 30}, 0)

    server.lie, server.answered = blank(0.9), 0
    with pytest.raises(PolicyError, match=r"completions do not parse.*`leret sample RECIPE --trial"):
        sample(served(server, samples=8, concurrency=2), Run.create(Path("long")))
    assert server.answered < 120, "a long run stops where most completions do not parse"
