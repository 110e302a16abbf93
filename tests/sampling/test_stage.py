"""The stage from a recipe to preferences, with a fake policy and real files."""

import json
import os
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
from tests.sampling.fakes import ROOT, FakePolicy, content, policy_is, recipe_of


def preferences(run):
    return (run.preferences / "train.parquet").read_bytes()


def test_a_recipe_becomes_a_bank_a_store_and_preferences(run):
    report = sample(recipe_of(), run)
    assert report.questions == report.new_questions == 30
    assert report.samples == sum(len(group.samples) for group in content(run))
    assert report.pairs > 0
    assert list(report.prompts) == [path.stem for path in sorted(run.prompts.glob("*.json"))]
    assert len(report.prompts) == 3
    manifest = run.manifest()
    assert manifest["sampling"]["data"]["corpus"] == str(Path("corpus.jsonl").resolve())
    assert set(manifest["digests"]) == {"corpus", "retriever", "program", "questions", "policy"}
    assert manifest["rounds"] == [{"policy": "fake", "model": "fake", "digest": "fake-policy"}]
    assert [event["event"] for event in run.events()] == ["started", "bank", "accounts", "built", "finished"]
    assert (run.preferences / "README.md").is_file()


def test_what_no_training_may_see_is_noted_and_noted_again_where_it_is_lost(run):
    recipe = recipe_of(data={"limit": 5})
    for _ in range(2):
        assert not sample(recipe, run).already
        assert json.loads(run.held_out.read_text()) == [
            f"q{i:02d}" for i in range(30) if split_of(f"q{i:02d}") == "test"
        ]
        run.held_out.unlink()


def test_a_finished_run_opens_nothing_again(run, made):
    first, again = sample(recipe_of(), run), sample(recipe_of(), run)
    assert len(made) == 1
    assert again.already
    assert not again.new_samples
    assert (again.samples, again.pairs, again.prompts) == (first.samples, first.pairs, first.prompts)


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
    with Store(run.store, read_only=True) as store:
        n_done = len(store.done("fake-policy"))
    assert 0 < n_done < 30
    pairs = build_preferences(run)
    assert pairs.questions == n_done
    closed = sample(recipe_of(data={"limit": n_done}), run)
    assert (closed.questions, closed.new_samples, closed.pairs) == (n_done, 0, pairs.pairs)
    sample(recipe_of(), run)
    assert content(run) == content(whole)
    assert preferences(run) == preferences(whole)


class Narrow(FakePolicy):
    """Some prompts do not fit it."""

    async def complete(self, request):
        if self.fail(request):
            raise PromptTooLongError("a prompt of 517 tokens does not fit")
        return [self._one(request, seed) for seed in request.seeds]


def test_a_prompt_that_does_not_fit_costs_its_samples_alone(run):
    with policy_is(Narrow(fail=lambda r: len(r.messages) > 1 and "number 3" in r.messages[-1]["content"])):
        report = sample(recipe_of(), run)
    assert (report.questions, report.waiting) == (30, 0)
    assert set(report.failures) == {"prompt"}
    assert 0 < report.failures["prompt"] < report.samples / 2
    assert any(note.endswith("do not fit the policy") for note in report.notes)
    assert sample(recipe_of(), run).already
    assert check_store(run).faults == []


def test_prompts_of_which_most_do_not_fit_stop_the_run(run):
    with (
        policy_is(Narrow(fail=lambda request: True)),
        pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*517 tokens.*a new run directory"),
    ):
        sample(recipe_of(prompts=1), run)


def test_another_strategy_rebuilds_the_pairs_without_a_sample(run, made):
    first, second = sample(recipe_of(), run), sample(recipe_of(strategy="all"), run)
    assert second.pairs >= first.pairs
    assert not made[1].requests


def test_pairs_made_by_hand_are_not_undone(run):
    sample(recipe_of(), run)
    build_preferences(run, "best-worst")
    assert sample(recipe_of(), run).already
    assert run.manifest()["preferences"]["strategy"] == "best-worst"


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


def test_samples_at_temperature_zero_would_all_be_the_same(run):
    with pytest.raises(ConfigError, match="temperature 0"):
        sample(recipe_of(policy={"temperature": 0}), run)


def test_questions_without_gold_cannot_be_sampled(run):
    Path("questions.jsonl").write_text('{"id": "q", "question": "who", "relevant_doc_ids": []}\n')
    with pytest.raises(DataError):
        sample(recipe_of(), run)


def test_a_report_says_why_there_are_few_prompts_and_little_spread(run, monkeypatch):
    monkeypatch.setattr(FakePolicy, "_one", lambda self, request, seed: Completion("zzz", "stop", 1, 1))
    told = " | ".join(sample(recipe_of(), run).notes)
    assert "no candidate of the prompt bank reached reward > 0" in told
    assert "at 60 of 60 states they have one reward; raise policy.temperature or sampling.samples" in told
    assert "retriever.k is 2" in plan(recipe_of(), run).notes[0]


def test_bad_lines_that_were_skipped_are_told(run):
    with Path("questions.jsonl").open("a") as file:
        file.write("{broken\n")
    sample(recipe_of(data={"skip_invalid": True}, prompts=1), run)
    [skipped] = [event for event in run.events() if event["event"] == "skipped"]
    assert sum(n for name, n in skipped.items() if name not in {"time", "stage", "event"}) == 1


def test_a_program_of_another_shape_is_sampled_by_its_path_alone(run):
    program = {"path": f"{ROOT}/tests/programs/threehop.py:ThreeHop", "adapter": {"kind": "compact"}}
    recipe = SamplingRecipe.model_validate({**recipe_of().model_dump(), "program": program})
    report = sample(recipe, run)
    assert plan(recipe, run).steps == 3
    groups = content(run)
    assert {(group.state.step, group.state.predictor) for group in groups} == {(0, "first"), (1, "then"), (2, "then")}
    assert groups[0].state.messages[-1]["content"].startswith("claim: what follows")
    assert report.pairs > 0
    if "1" in report.prompts:
        assert set(json.loads((run.prompts / "1.json").read_text())["demos"]) == {"first", "then"}


@pytest.mark.parametrize("name", ["rollouts.db", "preferences/train.parquet"])
def test_a_finished_run_sees_a_file_that_was_cut(run, name):
    recipe = recipe_of(data={"limit": 5})
    sample(recipe, run)
    path = run.path / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    if name == "rollouts.db":
        with pytest.raises(RunError, match=r"rollouts\.db is damaged"):
            sample(recipe, run)
    else:
        assert not sample(recipe, run).already
        assert path.read_bytes() == whole
