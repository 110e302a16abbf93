import json

from leret.core.errors import MissingDependency
from leret.rewards import REWARDS
from tests.cli.test_app import ROOT
from tests.first_steps import leret, refused, succeeds

WORLD = "data: {kind: world}\nprogram: {adapter: {kind: compact}}\n"


def test_a_reward_of_the_users_own_is_tested_by_name_and_by_recipe(tmp_path):
    assert json.loads(leret("rewards", "list", "--json")[1])["rewards"] == list(REWARDS)
    rewards, recipe = tmp_path / "own.py", tmp_path / "mine.yaml"
    rewards.write_text("def good(o): return len(o.doc_ids and o.outputs) - o.n_steps\n\ndef bad(o): return 1\n")
    recipe.write_text(f"{WORLD}sampling: {{samples: 2, reward: {{parts: {{recall@5: 1, own.py:good: 0.1}}}}}}\n")
    for reward, status, says in (
        (f"{rewards}:good", 0, "reaches its maximum"),
        (f"{rewards}:bad", 2, "does not get less"),
        ("{parts: {recall@5: 1, format: 0.5}, mixer: std}", 0, "recall@5 + format"),
        (recipe, 0, "recall@5 + own.py:good"),
    ):
        code, out = leret("rewards", "test", reward)
        assert (code, says in out) == (status, True), out


def test_example_of_the_how_to_passes_the_test_of_rewards(tmp_path, monkeypatch):
    page = (ROOT / "docs/how-to/reward.md").read_text(encoding="utf-8")
    (tmp_path / "rewards.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "reaches its maximum" in succeeds("rewards", "test", "rewards.py:score")


def test_reward_without_its_package_is_skipped_with_a_note(monkeypatch):
    def missing(outcome):
        raise MissingDependency("rouge-score", "eval")

    monkeypatch.setitem(REWARDS, "rouge1", missing)
    out = succeeds("rewards", "test")
    assert "rouge1 is skipped: rouge-score is not installed" in " ".join(out.split())
    assert "reaches its maximum" in out
    assert "rouge-score is not installed" in refused("rewards", "test", "rouge1")


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
