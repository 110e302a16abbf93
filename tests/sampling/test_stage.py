"""The stage from a recipe to preferences, with a fake policy and real files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, PolicyError, RunError
from leret.core.runs import Run
from leret.policies.base import Completion, PromptTooLongError
from leret.sampling.plan import plan
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, content, open_fakes, recipe_of, write_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A directory of data, and a finished run on it, to be left as it is."""
    directory = tmp_path_factory.mktemp("sampled")
    write_data(directory)
    run = Run.create(directory / "run")
    with pytest.MonkeyPatch.context() as patch:
        open_fakes(patch)
        sample(recipe_of(), run, base_dir=directory)
    return directory, run


def test_a_recipe_becomes_a_bank_a_store_and_preferences(place):
    directory, _ = place
    run = Run.create(directory / "run")
    report = sample(recipe_of(), run, base_dir=directory)
    assert report.questions == report.new_questions == 30
    assert report.samples == sum(len(group.samples) for group in content(run))
    assert report.pairs > 0
    assert list(report.prompts) == [path.stem for path in sorted(run.prompts.glob("*.json"))]
    assert len(report.prompts) == 3
    manifest = run.manifest()
    assert manifest["sampling"]["data"]["corpus"] == str(directory / "corpus.jsonl")
    assert set(manifest["digests"]) == {"corpus", "retriever", "program", "questions", "policy"}
    assert manifest["rounds"] == [{"policy": "fake", "model": "fake", "digest": "digest of fake"}]
    assert [event["event"] for event in run.events()] == ["started", "bank", "accounts", "built", "finished"]
    assert (run.preferences / "README.md").is_file()


def test_a_finished_run_opens_nothing_again(place):
    directory, made = place
    run = Run.create(directory / "run")
    first = sample(recipe_of(), run, base_dir=directory)
    again = sample(recipe_of(), run, base_dir=directory)
    assert len(made) == 1
    assert again.already
    assert not again.new_samples
    assert (again.samples, again.pairs, again.prompts) == (first.samples, first.pairs, first.prompts)


def test_two_runs_of_one_recipe_are_equal(place):
    directory, _ = place
    one, two = (Run.create(directory / name) for name in ("one", "two"))
    sample(recipe_of(), one, base_dir=directory)
    sample(recipe_of(concurrency=3), two, base_dir=directory)
    assert content(one) == content(two)
    for name in ("preferences/train.parquet", "prompts/1.json", "prompts/2.json"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


def test_a_larger_limit_adds_questions_to_the_same_bank(place):
    directory, made = place
    run = Run.create(directory / "run")
    first = sample(recipe_of(data={"limit": 20}), run, base_dir=directory)
    second = sample(recipe_of(), run, base_dir=directory)
    assert (first.questions, second.questions, second.new_questions) == (20, 30, 10)
    assert second.prompts == first.prompts
    assert len(made) == 2


def test_a_smaller_limit_closes_a_run_that_was_stopped(place, monkeypatch):
    directory, _ = place
    run = Run.create(directory / "run")
    policy = FakePolicy(fail=lambda request: len(policy.requests) > 150)
    policy.digest = "digest of fake"
    with monkeypatch.context() as patched:
        patched.setattr("leret.policies.load.make_policy", lambda settings: policy)
        with pytest.raises(PolicyError):
            sample(recipe_of(concurrency=1, data={"limit": 30}), run, base_dir=directory)
    with Store(run.store, read_only=True) as store:
        done = store.done("digest of fake")
    assert 0 < len(done) < 30
    pairs = build_preferences(run)
    assert pairs.questions == len(done)
    limit = {"data": {"limit": len(done)}}
    closed = sample(recipe_of(**limit), run, base_dir=directory)
    assert (closed.questions, closed.new_samples, closed.pairs) == (len(done), 0, pairs.pairs)
    sample(recipe_of(data={"limit": 30}), run, base_dir=directory)
    with Store(run.store, read_only=True) as store:
        assert len(store.done("digest of fake")) == 30


@pytest.mark.parametrize("limit", [6, None])
def test_gold_that_changed_is_noticed_under_any_limit(place, limit):
    directory, _ = place
    run = Run.create(directory / "run")
    sample(recipe_of(prompts=1, data={"limit": 8}), run, base_dir=directory)
    file = directory / "questions.jsonl"
    file.write_text(file.read_text().replace('["alpha", "beta"]', '["alpha"]'))
    with pytest.raises(RunError, match=r"questions: its content"):
        sample(recipe_of(prompts=1, data={"limit": limit}), run, base_dir=directory)


def test_a_prompt_that_does_not_fit_costs_its_samples_alone(place, monkeypatch):
    directory, _ = place
    run = Run.create(directory / "run")

    class Narrow(FakePolicy):
        digest = "narrow"

        async def complete(self, request):
            if len(request.messages) > 1 and "number 3" in request.messages[-1]["content"]:
                raise PromptTooLongError("a prompt of 517 tokens does not fit")
            return await super().complete(request)

    monkeypatch.setattr("leret.policies.load.make_policy", lambda settings: Narrow())
    report = sample(recipe_of(), run, base_dir=directory)
    assert (report.questions, report.waiting) == (30, 0)
    assert set(report.failures) == {"prompt"}
    assert 0 < report.failures["prompt"] < report.samples / 2
    assert any(note.endswith("do not fit the policy") for note in report.notes)
    assert sample(recipe_of(), run, base_dir=directory).already
    assert check_store(run).faults == []


def test_prompts_of_which_most_do_not_fit_stop_the_run(place, monkeypatch):
    directory, _ = place

    class Narrow(FakePolicy):
        async def complete(self, request):
            raise PromptTooLongError("a prompt of 517 tokens does not fit")

    monkeypatch.setattr("leret.policies.load.make_policy", lambda settings, cache=None: Narrow())
    with pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*517 tokens.*a new run directory"):
        sample(recipe_of(prompts=1), Run.create(directory / "run"), base_dir=directory)


def test_another_strategy_rebuilds_the_pairs_without_a_sample(place):
    directory, made = place
    run = Run.create(directory / "run")
    first = sample(recipe_of(), run, base_dir=directory)
    second = sample(recipe_of(strategy="all"), run, base_dir=directory)
    assert second.pairs >= first.pairs
    assert not made[1].requests


def test_pairs_made_by_hand_are_not_undone(place):
    directory, _ = place
    run = Run.create(directory / "run")
    sample(recipe_of(), run, base_dir=directory)
    build_preferences(run, "best-worst")
    assert sample(recipe_of(), run, base_dir=directory).already
    assert run.manifest()["preferences"]["strategy"] == "best-worst"


def test_another_policy_is_another_round_and_the_base_stays(place):
    directory, _ = place
    run = Run.create(directory / "run")
    sample(recipe_of(), run, base_dir=directory)
    sample(recipe_of(policy={"model": "ipo"}), run, base_dir=directory)
    manifest = run.manifest()
    assert [entry["model"] for entry in manifest["rounds"]] == ["fake", "ipo"]
    assert manifest["sampling"]["policy"]["model"] == "fake"
    assert manifest["digests"]["policy"] == "digest of ipo"
    with Store(run.store, read_only=True) as store:
        assert store.policy_digests() == ["digest of fake", "digest of ipo"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"samples": 3}, "sampling.samples: 2 in the run, 3 in the recipe"),
        ({"seed": 9}, "sampling.seed: 1 in the run, 9 in the recipe"),
        ({"reward": "recall"}, "sampling.reward: 'ap' in the run"),
        ({"policy": {"temperature": 0.5}}, "policy.temperature: 1.0 in the run, 0.5"),
        ({"data": {"split": "train"}}, "data.split: 'all' in the run"),
        ({"bank": {"max_demos": 1}}, "sampling.bank.max_demos: 2 in the run, 1"),
    ],
)
def test_what_decides_a_sample_may_not_change(sampled, change, key):
    directory, run = sampled
    with pytest.raises(RunError) as raised:
        sample(recipe_of(**change), run, base_dir=directory)
    assert key in str(raised.value)
    assert "name a new run directory" in str(raised.value)


def test_a_corpus_that_changed_is_noticed(place):
    directory, _ = place
    run = Run.create(directory / "run")
    sample(recipe_of(), run, base_dir=directory)
    with (directory / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"doc_id": "new", "title": "", "text": "alpha"}) + "\n")
    with pytest.raises(RunError, match=r"corpus: its content"):
        sample(recipe_of(), run, base_dir=directory)


@pytest.mark.parametrize("name", ["recall@1", "success", "all_found"])
def test_any_measure_of_evaluation_is_a_reward(place, name):
    directory, _ = place
    run = Run.create(directory / "run")
    report = sample(recipe_of(reward=name, prompts=1, data={"limit": 6}), run, base_dir=directory)
    assert {s.reward for group in content(run) for s in group.samples} <= {0.0, 0.5, 1.0}
    assert report.mean_reward > 0
    assert check_store(run).rewards_recomputed == report.samples


def test_samples_at_temperature_zero_would_all_be_the_same(place):
    directory, _ = place
    with pytest.raises(ConfigError, match="temperature 0"):
        sample(recipe_of(policy={"temperature": 0}), Run.create(directory / "run"), base_dir=directory)


def test_questions_without_gold_cannot_be_sampled(place):
    directory, _ = place
    (directory / "questions.jsonl").write_text(
        json.dumps({"id": "q", "question": "who", "relevant_doc_ids": []}) + "\n"
    )
    with pytest.raises(DataError):
        sample(recipe_of(), Run.create(directory / "run"), base_dir=directory)


def test_an_outage_leaves_a_run_that_the_same_command_finishes(place, monkeypatch):
    directory, _ = place
    whole, run = Run.create(directory / "whole"), Run.create(directory / "run")
    sample(recipe_of(), whole, base_dir=directory)
    n = 0

    def flaky(request):
        nonlocal n
        n += 1
        return n > 150

    policy = FakePolicy(fail=flaky)
    policy.digest = "digest of fake"
    with monkeypatch.context() as patched:
        patched.setattr("leret.policies.load.make_policy", lambda settings: policy)
        with pytest.raises(PolicyError, match="What is done is kept"):
            sample(recipe_of(), run, base_dir=directory)
    sample(recipe_of(), run, base_dir=directory)
    assert content(run) == content(whole)
    assert (run.preferences / "train.parquet").read_bytes() == (whole.preferences / "train.parquet").read_bytes()


def test_a_report_says_why_there_are_few_prompts_and_little_spread(place, monkeypatch):
    directory, _ = place
    monkeypatch.setattr(FakePolicy, "_one", lambda self, request, seed: Completion("zzz", "stop", 1, 1))
    report = sample(recipe_of(), Run.create(directory / "run"), base_dir=directory)
    told = " | ".join(report.notes)
    assert "no candidate of the prompt bank reached reward > 0" in told
    assert "at 60 of 60 states they have one reward; raise policy.temperature or sampling.samples" in told
    assert "retriever.k is 2" in plan(recipe_of(), Run(directory / "other"), base_dir=directory).notes[0]


def test_own_prompts_are_taken_from_a_directory(place):
    directory, _ = place
    (directory / "own").mkdir()
    demo = {"question": "who", "context": [], "query": "find who"}
    value = {"name": "mine", "score": None, "demos": {"write_query": [demo]}, "instructions": {}}
    (directory / "own" / "mine.json").write_text(json.dumps(value))
    run = Run.create(directory / "run")
    report = sample(recipe_of(bank={"path": str(directory / "own")}), run, base_dir=directory)
    assert list(report.prompts) == ["0", "1"]
    assert {s.prompt for group in content(run) for s in group.samples} == {"0", "1"}


KILLED = """
import sys, pathlib
directory, here = map(pathlib.Path, sys.argv[1:3])
sys.path.insert(0, str(here))
import leret.policies.load
from tests.sampling.fakes import FakePolicy, recipe_of
from leret.core.runs import Run
from leret.sampling.stage import sample

policy = FakePolicy(delay_s=0.01)
policy.digest = "digest of fake"
leret.policies.load.make_policy = lambda settings: policy
print("ready", flush=True)
sample(recipe_of(concurrency=2), Run.create(directory / "killed"), base_dir=directory)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_killed_at_any_moment_is_finished_by_the_same_command(place, how):
    directory, _ = place
    whole = Run.create(directory / "whole")
    sample(recipe_of(), whole, base_dir=directory)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory), str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    store = directory / "killed" / "rollouts.db-wal"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (store.is_file() and store.stat().st_size > 60_000):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, how)
    process.wait()
    process.stdout.close()
    assert process.returncode != 0, "it was still at work"
    run = Run.create(directory / "killed")
    sample(recipe_of(), run, base_dir=directory)
    assert content(run) == content(whole)
    assert (run.preferences / "train.parquet").read_bytes() == (whole.preferences / "train.parquet").read_bytes()


def test_a_run_stopped_while_it_makes_its_bank_is_finished_by_the_same_command(place, monkeypatch):
    directory, _ = place
    whole, run = Run.create(directory / "whole"), Run.create(directory / "run")
    sample(recipe_of(), whole, base_dir=directory)
    n = 0

    class Stopping(FakePolicy):
        async def complete(self, request):
            nonlocal n
            n += 1
            if n == 40:
                os.kill(os.getpid(), signal.SIGINT)
            return await super().complete(request)

    policy = Stopping()
    policy.digest = "digest of fake"
    with monkeypatch.context() as patched:
        patched.setattr("leret.policies.load.make_policy", lambda settings: policy)
        with pytest.raises(KeyboardInterrupt):
            sample(recipe_of(), run, base_dir=directory)
    assert "bank" not in run.manifest()
    sample(recipe_of(), run, base_dir=directory)
    assert content(run) == content(whole)


def test_bad_lines_that_were_skipped_are_told(place):
    directory, _ = place
    with (directory / "questions.jsonl").open("a") as file:
        file.write("{broken\n")
    run = Run.create(directory / "run")
    sample(recipe_of(data={"skip_invalid": True}, prompts=1), run, base_dir=directory)
    [skipped] = [event for event in run.events() if event["event"] == "skipped"]
    assert sum(n for name, n in skipped.items() if name not in {"time", "stage", "event"}) == 1


def test_a_program_of_another_shape_is_sampled_by_its_path_alone(place):
    directory, _ = place
    run = Run.create(directory / "run")
    recipe = recipe_of().model_dump()
    recipe["program"] = {"path": f"{ROOT}/tests/programs/threehop.py:ThreeHop", "adapter": {"kind": "compact"}}
    report = sample(SamplingRecipe.model_validate(recipe), run, base_dir=directory)
    assert plan(SamplingRecipe.model_validate(recipe), run, base_dir=directory).steps == 3
    groups = content(run)
    assert {(group.state.step, group.state.predictor) for group in groups} == {(0, "first"), (1, "then"), (2, "then")}
    assert groups[0].state.messages[-1]["content"].startswith("claim: what follows")
    assert report.pairs > 0
    if "1" in report.prompts:
        assert set(json.loads((run.prompts / "1.json").read_text())["demos"]) == {"first", "then"}


@pytest.mark.parametrize("name", ["rollouts.db", "preferences/train.parquet"])
def test_a_finished_run_sees_a_file_that_was_cut(place, name):
    directory, _ = place
    run = Run.create(directory / "run")
    sample(recipe_of(data={"limit": 5}), run, base_dir=directory)
    path = run.path / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    if name == "rollouts.db":
        with pytest.raises(RunError, match=r"rollouts\.db is damaged"):
            sample(recipe_of(data={"limit": 5}), run, base_dir=directory)
    else:
        assert not sample(recipe_of(data={"limit": 5}), run, base_dir=directory).already
        assert path.read_bytes() == whole


def test_a_run_whose_limit_grew_goes_on_with_the_same_questions(place):
    directory, _ = place
    run = Run.create(directory / "run")
    for limit in (5, 10):
        sample(recipe_of(data={"limit": limit}), run, base_dir=directory)
    os.utime(directory / "questions.jsonl")
    assert not sample(recipe_of(data={"limit": 10}), run, base_dir=directory).new_samples
