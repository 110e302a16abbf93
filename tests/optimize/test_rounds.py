"""The loop: what is scheduled, round by round."""

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.optimize.rounds import schedule
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe


def sampling(**policy):
    return SamplingRecipe.model_validate({"data": {"kind": "world"}, "policy": policy})


SAMPLING, EVAL = sampling(model="demo"), EvalRecipe()
SFT, IPO, MORE = SFTRecipe(), IPORecipe(init_from="sft"), SFTRecipe(name="sft-more", match_steps_of="ipo")


def trained(steps, number):
    """Name, init and control of the trainings of a round."""
    recipes = [step.recipe for step in steps if (step.round, step.stage) == (number, "train")]
    return [(recipe.policy_name, recipe.init_from, recipe.match_steps_of) for recipe in recipes]


def test_a_second_round_goes_on_from_the_last_policy_that_is_no_control(tmp_path):
    recipes = [SAMPLING, SFT, IPO, MORE, EVAL]
    assert [step.recipe for step in schedule(recipes, Run(tmp_path))] == recipes
    steps = schedule(recipes, Run(tmp_path), rounds=3)
    assert [step.stage for step in steps] == ["sample", "train", "train", "train", "eval"] * 3
    assert trained(steps, 1) == [("sft", "base", None), ("ipo", "sft", None), ("sft-more", "base", "ipo")]
    assert trained(steps, 2) == [("sft-2", "ipo", None), ("ipo-2", "sft-2", None), ("sft-more-2", "ipo", "ipo-2")]
    assert trained(steps, 3) == [("sft-3", "ipo-2", None), ("ipo-3", "sft-3", None), ("sft-more-3", "ipo-2", "ipo-3")]
    policies = [step.recipe.policy for step in steps if step.stage == "sample"]
    assert [policy.model.rpartition("/")[2] for policy in policies] == ["demo", "ipo", "ipo-2"]


def test_a_served_policy_is_followed_by_a_local_one(tmp_path):
    served = sampling(kind="openai", model="m", urls=["http://127.0.0.1:1/v1"])
    steps = schedule([served, SFT.model_copy(update={"init_from": "weights"})], Run(tmp_path), rounds=2)
    assert steps[2].recipe.policy.kind == "local"
    assert trained(steps, 2) == [("sft-2", "weights", None)]


def test_a_round_that_a_later_one_has_followed_is_done(tmp_path):
    run = Run.create(tmp_path / "r")
    run.update(rounds=[{"digest": "a"}, {"digest": "b"}])
    assert not any(step.done for step in schedule([SAMPLING, SFT, EVAL], run, rounds=2))
    (run.policies / "sft").mkdir(parents=True)
    (run.policies / "sft" / "training.json").write_text("{}")
    assert [step.done for step in schedule([SAMPLING, SFT, EVAL], run, rounds=2)] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("recipes", "rounds", "says"),
    [
        ([SAMPLING, SAMPLING], 1, "one recipe of sampling"),
        ([SFT], 1, "is not a run yet"),
        ([SAMPLING, EVAL], 2, "another round needs"),
        ([SAMPLING, SFT, SFT], 1, "two trainings are both named sft"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(tmp_path, recipes, rounds, says):
    with pytest.raises(ConfigError, match=says):
        schedule(recipes, Run(tmp_path / "r"), rounds)
