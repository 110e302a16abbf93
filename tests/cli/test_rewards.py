import json

from leret.rewards import REWARDS
from tests.first_steps import leret, refused, succeeds

WORLD = "data: {kind: world}\nprogram: {adapter: {kind: compact}}\n"


def test_rewards_and_mixers_are_listed():
    listed = json.loads(leret("rewards", "list", "--json")[1])
    assert listed["rewards"] == [*REWARDS, "answer_likelihood"]
    assert listed["mixers"][:2] == ["weights", "uniform"]


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
