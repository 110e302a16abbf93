import json

import dspy
import pytest

from leret.config.evaluation import EvalRecipe, label
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.evaluation.systems import available, focus, select
from leret.programs.prompts import Prompt


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run")


def trained(run, name, parent="base", **recipe):
    (run.policies / name).mkdir(parents=True)
    (run.policies / name / "training.json").write_text(json.dumps({"parent": parent, "key": {"recipe": recipe}}))


def prompt_file(path, name):
    path.parent.mkdir(exist_ok=True)
    Prompt(name, {"write_query": [{"question": name, "query": "x"}]}).save(path)
    return str(path)


def test_bank_is_the_best_prompt_and_policies_are_all_of_them_in_the_tables_order(run):
    for name in ("10", "0", "2", "1"):
        prompt_file(run.prompts / f"{name}.json", name)
    trained(run, "ipo", parent="sft")
    trained(run, "sft")
    trained(run, "sft-more", match_steps_of="ipo")
    systems = select(("policies", "bank", "base"), available(run, {}, {}))
    assert [s.name for s in systems] == ["base", "bank:1", "sft", "sft-more", "ipo"]
    assert systems[1].prompt.demos["write_query"][0]["question"] == "1"
    # compared with the parent, the control and the raw question
    assert systems[-1].rivals == ("sft", "sft-more", "raw-question")
    recipe = EvalRecipe(systems=("few-shot:2", "bank:10"), baseline="few-shot:2")
    assert recipe.baseline == "bank:2"
    names = [system.name for system in select(recipe.systems, available(run, {}, {}))]
    assert (names, [label(name) for name in names]) == (["bank:2", "bank:10"], ["few-shot:2", "few-shot:10"])


def test_the_focus_finds_most_elsewhere_or_is_the_last_and_no_control(run):
    trained(run, "sft")
    trained(run, "sft-more", parent="sft", match_steps_of="ipo")
    trained(run, "sft-random", targets="random")
    chosen = [("base", "policies"), ("base", "sft-more"), ("base",)]
    assert [focus(select(names, available(run, {}, {}))) for names in chosen] == ["sft", "sft-more", None]
    trained(run, "ipo", parent="sft")
    systems, names = select(("policies",), available(run, {}, {})), ("sft", "ipo")
    for best in names:
        assert focus(systems, {name: 0.5 + (name == best) / 10 for name in names}) == best
    assert focus(systems, dict.fromkeys(names, 0.5)) == focus(systems) == "ipo"


def test_demos_are_extra_systems_on_the_base_and_prompts_that_show_hints_are_none(run, tmp_path):
    mine = prompt_file(tmp_path / "mine.json", "x")
    systems = select(("base",), available(run, {"mine": mine}, {}), ["mine"])
    assert [(s.name, s.policy, s.kind) for s in systems][1] == ("mine", "base", "prompt")
    with pytest.raises(ConfigError, match="'base' is in use"):
        available(run, {"base": mine}, {})
    with pytest.raises(RunError, match="is not a prompt"):
        available(run, {"other": str(tmp_path / "absent.json")}, {})

    prompt_file(run.prompts / "1.json", "1")
    Prompt("2", hint="gold").save(run.prompts / "2.json")
    hinted = available(run, {"mine": str(run.prompts / "2.json")}, {})
    assert [system.name for system in select(("base", "bank"), hinted)] == ["base", "bank:1"]
    with pytest.raises(ConfigError, match=r"systems: bank:2 shows hints .* remove it"):
        select(("bank", "bank:2"), hinted)
    with pytest.raises(ConfigError, match="systems: mine shows hints"):
        select(("base",), hinted, ["mine"])


def test_a_training_that_is_not_finished_is_no_policy(run):
    trained(run, ".ipo")
    (run.policies / "half").mkdir()
    assert list(available(run, {}, {})) == ["raw-question", "oracle-titles", "rm3", "base", "hyde"]
    (run.policies / "half" / "training.json").write_text("{")
    with pytest.raises(RunError, match="train again"):
        available(run, {}, {})


def test_a_retriever_is_used_with_all_systems_unless_some_are_named_for_it(run):
    trained(run, "sft")
    known = available(run, {}, {}, ["dense", "hybrid"])
    every = select(("raw-question", "policies", "rm3"), known)
    names = ["raw-question", "rm3", "sft"]  # RM3 is a way to search with BM25
    names += [f"{system}@{retriever}" for retriever in ("dense", "hybrid") for system in ("raw-question", "sft")]
    assert [system.name for system in every] == names
    assert (every[-1].method, every[-1].retriever) == ("sft", "hybrid")
    assert every[-1].rivals == ("sft", "raw-question@hybrid")
    some = select(("raw-question", "sft", "sft@dense", "raw-question@hybrid"), known)
    assert [system.name for system in some] == ["raw-question", "sft", "sft@dense", "raw-question@hybrid"]
    assert focus(some) == "sft"  # the program to deliver searches with the run's retriever


def test_a_saved_program_sends_no_key_that_the_run_does_not_send(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    policy = {"kind": "openai", "model": "x", "urls": ["http://127.0.0.1:9/v1"], "api_key_env": "MY_KEY"}
    saved = {"version": 3, "dspy": dspy.__version__, "predictors": {"self.write": {"state": {}, "lm": 0}}}
    saved |= {"lms": [{"policy": policy, "config": {}}], "picks": {}}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/program.json").write_text(json.dumps(saved))
    monkeypatch.setattr(Prompt, "load", lambda path: Prompt("theirs", {}))
    recipe = {"data": {"kind": "world"}, "program": {"path": "pipelines/multihop.py:MultiHop"}}
    run.update(sampling=recipe)
    demos = {"theirs": str(tmp_path / "theirs")}
    with pytest.raises(ConfigError, match=r"demos\.theirs: .*MY_KEY to http://127\.0\.0\.1:9/v1.*`actors`"):
        available(run, demos, {})
    run.update(sampling={**recipe, "policy": policy})
    assert available(run, demos, {})["theirs"].settings
