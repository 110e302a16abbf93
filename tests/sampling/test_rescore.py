import multiprocessing
import os
import shutil
import signal

import pytest

from leret.config.sampling import RewardSettings
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.rewards.combine import find_mixer
from leret.sampling import rescore as rescoring
from leret.sampling.rescore import rescore
from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.sampling.conftest import sampled_by
from tests.sampling.fakes import FakePolicy, content, preferences, write_data
from tests.sampling.preferences.conftest import rows_of

OWN = """
def titles(outcome):
    return sum(len(p.title + p.text) for p in outcome.ranking) + len(outcome.text)


def ended(outcome):
    return 0.0 if outcome.prediction is None else float(len(outcome.prediction.context[0]))
"""
WEIGHTS = {"recall@1": 1.0, "rr": 0.5, "steps": 0.1}


def sampled(directory, reward="ap", junk=0.1, **recipe):
    return sampled_by(FakePolicy(junk=junk), directory, limit=10, reward=reward, **recipe)


@pytest.fixture
def own(tmp_path, made):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    "reward",
    [
        {"parts": {"near": {"function": "deep_recall", "depth": 3}}},
        {"parts": WEIGHTS, "mixer": "pca", "unparsed_reward": -2},
        {"parts": {"own.py:titles": 1, "own.py:ended": 0.25}, "mixer": "std"},
    ],
)
def test_pairs_equal_those_of_a_run_sampled_with_that_reward(tmp_path, own, reward):
    there, here = sampled(tmp_path / "there", reward), sampled(tmp_path / "here")
    asked, before = len(content(here)), (content(here), preferences(here))
    report = rescore(here, RewardSettings.model_validate(reward))
    other = {(group.state.id, group.samples[0].id): group.samples for group in content(there)}
    both = [group for group in content(here) if (group.state.id, group.samples[0].id) in other]
    assert len(both) >= 10  # all first states, and those after a choice that is the same
    for group in both:
        assert group.samples == other[group.state.id, group.samples[0].id]
    states = {group.state.id for group in both}
    pairs = [[row for row in rows_of(run) if row["state_id"] in states] for run in (here, there)]
    assert pairs[0] == pairs[1]
    assert pairs[0]
    assert report.states == asked
    assert (report.other_choices > 0) == bool(report.notes) == (len(both) < asked or report.other_choices > 0)

    again = rescore(here, "ap")
    assert (content(here), preferences(here)) == before
    assert (again.other_choices, again.notes) == (0, ())
    assert rescore(here).changed == 0


def test_what_cannot_be_rescored_is_refused_and_nothing_changes(tmp_path, made):
    run = sampled(tmp_path / "run")
    before = content(run)
    own = RewardSettings.model_validate({"parts": {"final": {"function": "rr"}}})
    for reward, says in (
        ("f1", "f1 has no value for question"),  # its tasks have no reference answers
        (own, r"parts\.final: this name is reserved"),
    ):
        with pytest.raises(ConfigError, match=says):
            rescore(run, reward)
    assert content(run) == before
    by_end = sampled(tmp_path / "final", credit="final")
    with pytest.raises(ConfigError, match="credit is final"):
        rescore(by_end, "recall@1")


@pytest.fixture(scope="module")
def rescored(tmp_path_factory):
    """A directory with a run, and what it holds under its reward and under another one."""
    home = tmp_path_factory.mktemp("rescored")
    write_data(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run, new = sampled(home / "run"), sampled(home / "new")
        rescore(new, "recall@1")
        return home, {"ap": (content(run), preferences(run)), "recall@1": (content(new), preferences(new))}


STEPS = [
    (Run, "prepare", False),
    (shutil, "rmtree", False),
    (Store, "flush", False),
    (Run, "update", False),
    (rescoring, "build_preferences", False),
    (rescoring, "build_preferences", True),
]


def killed(run, where, name, after):
    def work():
        step = getattr(where, name)

        def last(*arguments, **keys):
            if after:
                step(*arguments, **keys)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(where, name, last)
        rescore(run, "recall@1")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("where", "name", "after"), STEPS)
def test_a_kill_leaves_the_old_rewards_or_the_new_ones(tmp_path, rescored, monkeypatch, where, name, after):
    home, states = rescored
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "copy"))
    run = Run.open(tmp_path / "copy/run")
    killed(run, where, name, after)
    found = Run.open(run.path).manifest.sampling["sampling"]["reward"]
    assert content(run) == states[found][0]
    assert not (run.preferences / "train.parquet").is_file() or preferences(run) == states[found][1]
    assert check_store(run).faults == []
    with pytest.raises(RunError, match=r"sampling\.reward"):
        sampled(run.path, "recall@1" if found == "ap" else "ap")
    sampled(run.path, found)
    assert (content(run), preferences(run)) == states[found]
    assert "prepared" not in run.record() or found == "ap"
    rescore(run, "recall@1")
    assert (content(run), preferences(run)) == states["recall@1"]
    assert "prepared" not in run.record()


def test_final_parts_are_kept_apart_and_mixed_over_the_state(tmp_path, made):
    final = {"parts": ["recall", "rr", "steps"], "mixer": "pca"}
    run = sampled(tmp_path / "run", "recall@1", junk=0.0, final=final, credit="both", final_weight=0.25)
    group = content(run)[0]
    parts = {f"final.{name}": 1.0 for name in final["parts"]}
    finals = find_mixer("pca")([s.components for s in group.samples], parts)
    steps = [s.components["recall@1"] for s in group.samples]
    assert [s.components["final"] for s in group.samples] == pytest.approx(finals)
    expected = [0.25 * final + 0.75 * step for final, step in zip(finals, steps, strict=True)]
    assert [s.reward for s in group.samples] == pytest.approx(expected)
