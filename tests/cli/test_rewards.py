import json

from leret.rewards import REWARDS
from tests.first_steps import leret, refused, succeeds

WORLD = "data: {kind: world}\nprogram: {adapter: {kind: compact}}\n"


def test_rewards_and_mixers_are_listed():
    listed = json.loads(leret("rewards", "list", "--json")[1])
    assert listed["rewards"] == list(REWARDS)
    assert "weights" in listed["mixers"]


def test_a_run_is_rescored_and_a_wrong_reward_is_refused(tmp_path, small):
    succeeds("sample", "sampling/demo.yaml", "--run", tmp_path / "r", *small)
    for reward, says in (("apx", "unknown measure 'apx'"), ("{parts: {ap: 1}, mixr: std}", "mixr")):
        assert says in refused("rescore", "--run", tmp_path / "r", "--reward", reward)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{WORLD}sampling: {{samples: 2, credit: both, reward: rr, final: ap}}\n")
    out = succeeds("rescore", "--run", tmp_path / "r", "--reward", recipe)
    assert "sampling.final is ignored" in " ".join(out.split())
    out = succeeds("rescore", "--run", tmp_path / "r", "--reward", "{parts: {ap: 2}}", "--json")
    assert json.loads(out.splitlines()[-1])["samples"] > 0


def test_two_files_of_texts_are_scored(tmp_path):
    (tmp_path / "a.txt").write_text("red cat\n\n")
    (tmp_path / "r.txt").write_text("red dog\nx\n")
    files = (tmp_path / "a.txt", "--references", tmp_path / "r.txt")
    assert "0.2500" in succeeds("score", *files, "--measures", "f1, em")
    report = json.loads(succeeds("score", *files, "--json"))
    assert (report["measures"], report["n_answers"]) == ({"f1": 0.25}, 2)
    assert "--measures: unknown measure 'bluh'" in refused("score", *files, "--measures", "bluh")
