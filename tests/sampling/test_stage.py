"""The stage from a recipe to preferences, with a fake policy and real files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, PolicyError, RunError
from leret.core.runs import Run
from leret.datasets.splits import split_of
from leret.policies.base import Completion, PromptTooLongError
from leret.sampling.plan import plan
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.sampling.fakes import ROOT, FakePolicy, content, policy_is, preferences, recipe_of

TOO_LONG = PromptTooLongError("a prompt of 517 tokens does not fit")


def test_a_recipe_becomes_a_bank_a_store_and_preferences(run):
    report = sample(recipe_of(), run)
    assert report.questions == report.new_questions == 30
    assert report.samples == sum(len(group.samples) for group in content(run))
    assert report.pairs > 0
    assert list(report.prompts) == [path.stem for path in sorted(run.prompts.glob("*.json"))] == ["0", "1", "2"]
    manifest = run.manifest()
    assert manifest["sampling"]["data"]["corpus"] == str(Path("corpus.jsonl").resolve())
    assert set(manifest["digests"]) == {"corpus", "retriever", "program", "questions", "policy"}
    assert manifest["rounds"] == [{"policy": "fake", "model": "fake", "digest": "fake-policy"}]
    assert [event["event"] for event in run.events()] == ["started", "bank", "accounts", "built", "finished"]


def test_what_no_training_may_see_is_noted_and_noted_again_where_it_is_lost(run):
    recipe = recipe_of(data={"limit": 5})
    for _ in range(2):
        assert not sample(recipe, run).already
        assert json.loads(run.held_out.read_text()) == [
            f"q{i:02d}" for i in range(30) if split_of(f"q{i:02d}") == "test"
        ]
        run.held_out.unlink()


def test_a_finished_run_opens_nothing_again_and_leaves_pairs_made_by_hand(run, made):
    first, _ = sample(recipe_of(), run), build_preferences(run, "best-worst")
    again = sample(recipe_of(), run)
    assert len(made) == 1
    assert (again.already, again.new_samples, again.samples, again.pairs) == (True, 0, first.samples, first.pairs)
    assert run.manifest()["preferences"]["strategy"] == "best-worst"
    assert sample(recipe_of(strategy="all"), run).pairs >= first.pairs  # another strategy asks nothing either
    assert not made[1].requests


def test_two_runs_of_one_recipe_are_equal(run):
    other = Run.create(Path("other"))
    sample(recipe_of(), run)
    sample(recipe_of(concurrency=3), other)
    assert content(run) == content(other)
    for name in ("preferences/train.parquet", "prompts/1.json", "prompts/2.json"):
        assert (run.path / name).read_bytes() == (other.path / name).read_bytes()


def test_a_larger_limit_adds_questions_to_the_same_bank(run):
    first, second = (sample(recipe_of(data={"limit": limit}), run) for limit in (20, 30))
    assert (first.questions, second.questions, second.new_questions) == (20, 30, 10)
    assert second.prompts == first.prompts
    os.utime("questions.jsonl")
    assert not sample(recipe_of(), run).new_samples


def test_a_smaller_limit_closes_a_run_that_an_outage_stopped(run):
    whole = Run.create(Path("whole"))
    sample(recipe_of(), whole)
    away = FakePolicy(fail=lambda request: len(away.requests) > 150)
    with policy_is(away), pytest.raises(PolicyError, match="What is done is kept"):
        sample(recipe_of(concurrency=1, data={"limit": 30}), run)
    pairs = build_preferences(run)
    assert 0 < pairs.questions < 30
    closed = sample(recipe_of(data={"limit": pairs.questions}), run)
    assert (closed.questions, closed.new_samples, closed.pairs) == (pairs.questions, 0, pairs.pairs)
    sample(recipe_of(), run)
    assert content(run) == content(whole)
    assert preferences(run) == preferences(whole)


def test_a_prompt_that_does_not_fit_costs_its_samples_alone(run):
    def narrow(request):
        return len(request.messages) > 1 and "number 3" in request.messages[-1]["content"] and TOO_LONG

    with policy_is(FakePolicy(fail=narrow)):
        report = sample(recipe_of(), run)
    assert (report.questions, report.waiting, set(report.failures)) == (30, 0, {"prompt"})
    assert 0 < report.failures["prompt"] < report.samples / 2
    assert any(note.endswith("do not fit the policy") for note in report.notes)
    assert sample(recipe_of(), run).already
    assert check_store(run).faults == []


def test_prompts_of_which_most_do_not_fit_stop_the_run(run):
    stops = pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*517 tokens.*a new run directory")
    with policy_is(FakePolicy(fail=lambda request: TOO_LONG)), stops:
        sample(recipe_of(prompts=1), run)


def test_another_policy_is_another_round_and_the_base_stays(run):
    for model in ("fake", "ipo"):
        sample(recipe_of(policy={"model": model}), run)
    manifest = run.manifest()
    assert [entry["model"] for entry in manifest["rounds"]] == ["fake", "ipo"]
    assert manifest["sampling"]["policy"]["model"] == "fake"
    assert manifest["digests"]["policy"] == "ipo-policy"
    with Store(run.store, read_only=True) as store:
        assert store.policy_digests() == ["fake-policy", "ipo-policy"]


@pytest.mark.parametrize("name", ["recall@1", "all_found"])
def test_any_measure_of_evaluation_is_a_reward(run, name):
    report = sample(recipe_of(reward=name, prompts=1, data={"limit": 6}), run)
    assert {s.reward for group in content(run) for s in group.samples} <= {0.0, 0.5, 1.0}
    assert report.mean_reward > 0
    assert check_store(run).rewards_recomputed == report.samples


def test_what_cannot_be_sampled_is_refused(run):
    with pytest.raises(ConfigError, match="temperature 0"):  # all samples would be the same
        sample(recipe_of(policy={"temperature": 0}), run)
    Path("questions.jsonl").write_text('{"id": "q", "question": "who", "relevant_doc_ids": []}\n')
    with pytest.raises(DataError, match="nothing can be scored"):
        sample(recipe_of(), run)


def test_a_report_says_why_there_are_few_prompts_and_little_spread(run, monkeypatch):
    monkeypatch.setattr(FakePolicy, "_one", lambda self, request, seed: Completion("zzz", "stop", 1, 1))
    told = " | ".join(sample(recipe_of(), run).notes)
    assert "no candidate of the prompt bank reached reward > 0" in told
    assert "at 60 of 60 states they have one reward; raise policy.temperature or sampling.samples" in told
    assert "retriever.k is 2" in plan(recipe_of(), run).notes[0]


def test_a_program_of_another_shape_is_sampled_by_its_path_alone(run):
    program = {"path": f"{ROOT}/tests/programs/threehop.py:ThreeHop", "adapter": {"kind": "compact"}}
    sample(SamplingRecipe.model_validate({**recipe_of().model_dump(), "program": program}), run)
    states = [group.state for group in content(run)]
    assert {(state.step, state.predictor) for state in states} == {(0, "first"), (1, "then"), (2, "then")}
    assert set(json.loads((run.prompts / "1.json").read_text())["demos"]) == {"first", "then"}


def test_a_finished_run_sees_a_file_that_was_cut(run):
    sample(recipe_of(), run)
    pairs, table = run.preferences / "train.parquet", preferences(run)
    pairs.write_bytes(table[: len(table) // 2])
    assert not sample(recipe_of(), run).already
    assert preferences(run) == table
    run.store.write_bytes(run.store.read_bytes()[:20_000])
    with pytest.raises(RunError, match=r"rollouts\.db is damaged"):
        sample(recipe_of(), run)


@pytest.mark.parametrize("faults", [0.0, 0.3], ids=["sound replies", "30 % faulty replies"])
def test_a_run_killed_three_times_equals_one_that_was_not(faults):
    """`benchmarks/kills.py` is the long version of this."""
    command = [sys.executable, "benchmarks/kills.py", "--kills", "3", "--questions", "40"]
    command += ["--faults", str(faults), "--samples", "1", "--timeout-s", "3", "--stall-s", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode in {0, 1}, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["equal"], told["asked_twice"], len(told["at"]), bool(told["faults"])) == (True, 0, 3, bool(faults))
    assert 40 * 4 < told["requests"] <= 40 * 2 * 4
