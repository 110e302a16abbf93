import json

import pytest

from tests.first_steps import refused, succeeds

WORLD = "data: {kind: world}\nprogram: {adapter: {kind: compact}}\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--address", "auto"], "needs --workers N"), (["--workers", "2", "--shard", "0/2"], "remove one of them"),
     (["--merge", "x", "--shard", "0/2"], "remove one of them"), (["--shard", "2/2", "--set", "data.limit=2"], "2/2")],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags, says):
    assert says in refused("sample", "demo", "--run", tmp_path / "r", *flags)


def test_a_run_is_rescored_and_paired_again_and_a_wrong_reward_is_refused(tmp_path, small):
    succeeds("sample", "sampling/demo.yaml", "--run", tmp_path / "r", *small)
    for reward, says in (("apx", "unknown measure 'apx'"), ("{parts: {ap: 1}, mixr: std}", "mixr")):
        assert says in refused("rescore", "--run", tmp_path / "r", "--reward", reward)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{WORLD}sampling: {{samples: 2, credit: both, reward: rr, final: ap}}\n")
    out = succeeds("rescore", "--run", tmp_path / "r", "--reward", recipe)
    assert "sampling.final is ignored" in " ".join(out.split())
    out = succeeds("rescore", "--run", tmp_path / "r", "--reward", "{parts: {ap: 2}}", "--json")
    assert json.loads(out.splitlines()[-1])["samples"] > 0

    run = ["--run", tmp_path / "r"]  # pairs are made as before unless another strategy is named
    before = json.loads(succeeds("rescore", *run, "--json"))
    assert (before["strategy"], before["margin"], before["max_pairs"]) == ("adjacent", 0.0, 2)  # as in the recipe
    for flags, pairs in (
        (["--strategy", "margin", "--margin", "0.1"], ("margin", 0.1, None)),
        (["--max-pairs", "1"], ("margin", 0.1, 1)),
        (["--margin", "0.2"], ("margin", 0.2, 1)),
    ):
        changed = json.loads(succeeds("rescore", *run, *flags, "--json"))
        assert (changed["strategy"], changed["margin"], changed["max_pairs"]) == pairs
    says = "--margin 0.1 needs --strategy margin, but the strategy is all"
    assert says in " ".join(refused("rescore", *run, "--strategy", "all", "--margin", "0.1").split())


def test_runs_of_other_machines_are_merged_before_the_rest_is_sampled(tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = ["sample", "sampling/demo.yaml", *small]
    succeeds(*sample, "--shard", "0/2")
    assert (tmp_path / "runs/demo/shards").is_dir()  # the default is the recipe's name
    succeeds(*sample, "--shard", "1/2", "--run", "other")
    report = json.loads(succeeds(*sample, "--merge", "other", "--json").splitlines()[-1])
    assert (report["questions"], report["samples"], report["new_samples"]) == (6, 24, 0)
    assert "is not a run directory" in refused(*sample, "--merge", "missing")
