"""What can be evaluated in a run."""

import json

import pytest

from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.evaluation.systems import available, focus, select
from leret.programs.prompts import Prompt

DEFAULT = ("raw-question", "oracle-titles", "base", "bank", "policies")


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run")


def trained(run, name, parent="base", **recipe):
    directory = run.policies / name
    directory.mkdir(parents=True)
    (directory / "training.json").write_text(
        json.dumps({"parent": parent, "key": {"recipe": recipe}, "log_history": []})
    )


def bank(run, *names):
    run.prompts.mkdir(exist_ok=True)
    for name in names:
        Prompt(name, {"write_query": [{"question": name, "query": "x"}]}).save(run.prompts / f"{name}.json")


def test_bank_and_policies_stand_for_all_of_them_in_the_tables_order(run):
    bank(run, "10", "0", "2", "1")
    trained(run, "ipo", parent="sft")
    trained(run, "sft")
    trained(run, "sft-more", match_steps_of="ipo")
    systems = select(("policies", "bank", "base"), available(run, {}))
    assert [s.name for s in systems] == ["base", "bank:1", "bank:2", "bank:10", "sft", "sft-more", "ipo"]
    assert systems[1].prompt.demos["write_query"][0]["question"] == "1"


def test_a_policy_is_compared_with_its_parent_its_control_and_the_raw_question(run):
    trained(run, "sft")
    trained(run, "ipo", parent="sft")
    trained(run, "sft-more", match_steps_of="ipo")
    systems = available(run, {})
    assert systems["ipo"].rivals == ("sft", "sft-more", "raw-question")
    assert systems["sft"].rivals == ("raw-question",)


def test_the_report_is_about_the_last_policy_that_is_no_control(run):
    trained(run, "sft")
    trained(run, "sft-more", parent="sft", match_steps_of="ipo")
    trained(run, "sft-random", targets="random")
    assert focus(select(DEFAULT, available(run, {}))) == "sft"
    assert focus(select(("base", "sft-more"), available(run, {}))) == "sft-more"
    assert focus(select(("base",), available(run, {}))) is None


def test_unknown_names_are_listed_together_with_what_there_is(run):
    trained(run, "sft")
    with pytest.raises(ConfigError) as caught:
        select(("sftt", "base", "bank:7"), available(run, {}))
    assert len(caught.value.problems) == 2
    assert "'sftt' is not in this run; did you mean sft? it has raw-question" in caught.value.problems[0]


def test_demos_are_extra_systems_on_the_base(run, tmp_path):
    Prompt("x", {"write_query": [{"question": "mine", "query": "x"}]}).save(tmp_path / "mine.json")
    systems = select(("base",), available(run, {"mine": str(tmp_path / "mine.json")}), ["mine"])
    assert [(s.name, s.policy, s.kind) for s in systems][1] == ("mine", "base", "prompt")
    with pytest.raises(ConfigError, match="'base' cannot name a system"):
        available(run, {"base": str(tmp_path / "mine.json")})
    with pytest.raises(RunError, match="is not a prompt"):
        available(run, {"other": str(tmp_path / "absent.json")})


def test_a_training_that_is_not_finished_is_no_policy(run):
    trained(run, ".ipo")
    (run.policies / "half").mkdir()
    assert list(available(run, {})) == ["raw-question", "oracle-titles", "rm3", "base"]
    (run.policies / "half" / "training.json").write_text("{")
    with pytest.raises(RunError, match="train it again"):
        available(run, {})


def test_a_fusion_brings_its_parts_and_comes_after_them(run):
    systems = select(("fused:base", "rm3"), available(run, {}))
    assert [s.name for s in systems] == ["raw-question", "rm3", "base", "fused:base"]
    assert [part.name for part in systems[-1].parts] == ["raw-question", "base"]
    assert systems[-1].rivals == ("base", "raw-question")
    with pytest.raises(ConfigError, match="'fused:nope' is not in this run"):
        select(("fused:nope",), available(run, {}))
