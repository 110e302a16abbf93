import datasets
import pytest

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.sampling.preferences.dataset import build_preferences, make_pairs, state_targets
from leret.sampling.store.store import PathStep, SamplingParams, Store
from tests.sampling.fakes import made
from tests.sampling.preferences.conftest import sample_of


@pytest.fixture
def store(run):
    with Store(run.store) as store:
        yield store


def test_datasets_reads_pairs_on_the_zero_shot_prompt_with_both_rewards(run):
    build_preferences(run)
    rows = datasets.load_dataset(str(run.preferences), cache_dir=str(run.cache))["train"].to_list()
    assert [r["chosen"][0]["content"] + r["rejected"][0]["content"] for r in rows] == ["ca", "ab", "yx"]
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "ask q1-0"}],
        "chosen": [{"role": "assistant", "content": "c"}], "rejected": [{"role": "assistant", "content": "a"}],
        "score_chosen": 1.0, "score_rejected": 0.5,
        "question_id": "q1", "state_id": "q1-0", "step": 0, "predictor": "write",
        "chosen_id": "q1-0-3", "rejected_id": "q1-0-0", "chosen_prompt": "1", "rejected_prompt": "0",
        "chosen_finish_reason": None, "rejected_finish_reason": None,
        "chosen_token_ids": None, "rejected_token_ids": None,
    }  # fmt: skip


SAMPLES = [made("a", 1.0), made("b", 0.5), made("c", 0.5), made("d", 0.0)]


@pytest.mark.parametrize(
    ("strategy", "limits", "expected"),
    [
        ("adjacent", {}, ["ab", "ac", "bd", "cd"]),
        ("best-worst", {}, ["ad"]),
        ("all", {}, ["ab", "ac", "ad", "bd", "cd"]),
        ("margin", {"margin": 0.75}, ["ad"]),
        ("all", {"max_pairs": 1}, ["ad"]),  # the widest margins, in their order
        ("all", {"max_pairs": 3}, ["ab", "ac", "ad"]),
    ],
)
def test_strategies_by_hand(strategy, limits, expected):
    pairs = make_pairs(SAMPLES, strategy, **limits)
    assert [chosen.id + rejected.id for chosen, rejected in pairs] == expected
    assert make_pairs(SAMPLES[1:3], strategy, **limits) == []


def test_only_the_named_policys_samples_are_paired(run, store):
    store.put_visit(PathStep("q2", 0, "Q", "q2-0", None, None, "solved"))
    rows = [sample_of(i, "0", text, reward, "q2") for i, text, reward in ((10, "g", 1.0), (11, "h", 0.5))]
    store.put_samples(rows, SamplingParams("next", "Q", "D", 1.0, 1.0, 8))
    store.flush()
    assert build_preferences(run, policy_digest="Q").pairs == 1
    for policy, n in (("Q", 1), ("P", 3)):
        run.update(digests={"policy": policy})
        assert build_preferences(run).pairs == n


def test_a_run_without_samples_is_refused(tmp_path):
    run = Run.create(tmp_path / "empty")
    with pytest.raises(RunError, match="run `leret sample"):
        build_preferences(run)
    Store(run.store).close()
    with pytest.raises(RunError, match="has no finished questions"):
        build_preferences(run)
    assert not (run.preferences / "train.parquet").exists()


def targets(store, *how, policy="P", **settings):
    return [target for group in store.finished(policy) for target in state_targets(group, *how, **settings)]


def test_best_targets_are_the_highest_of_finished_questions(store):
    assert [(t.completion, t.reward, t.state_id) for t in targets(store)] == [("c", 1.0, "q1-0"), ("y", 0.75, "q1-1")]
    assert len(targets(store, require_spread=False)) == 3
    assert targets(store, policy="Q") == []
    for step, parent in ((0, None), (1, "q1-0-0")):
        store.put_visit(PathStep("q1", step, "P", f"q1-{step}", parent, f"q1-{step}-0", "next"))
    assert {target.task_id for target in targets(store, require_spread=False)} == {"q2"}


def test_random_targets_come_from_any_level_as_often_as_sampled_and_differ(store):
    drawn, again = ([targets(store, "random", seed=seed)[0].completion for seed in range(200)] for _ in range(2))
    assert drawn == again
    # four scored samples at the first state: a, b, a, c
    assert {text: round(drawn.count(text) / 50) for text in "abc"} == {"a": 2, "b": 1, "c": 1}
    several = targets(store, "random", max_targets=5)
    assert sorted(target.completion for target in several if target.state_id == "q1-0") == ["a", "b", "c"]
