"""The loop: what is scheduled, round by round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.optimize.rounds import Recipe, RoundStage, schedule
from leret.training.algorithms import TrainingRecipe
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe

SAMPLING = SamplingRecipe.model_validate({"data": {"kind": "world"}, "policy": {"model": "demo"}})
SFT = SFTRecipe()
IPO = IPORecipe(init_from="sft")
MORE = SFTRecipe(name="sft-more", match_steps_of="ipo")
EVAL = EvalRecipe()
ALL: list[Recipe] = [SAMPLING, SFT, IPO, MORE, EVAL]


def trained(steps: list[RoundStage], number: int) -> list[tuple[str, str, str | None]]:
    """Name, init and control of the trainings of a round."""
    recipes = [s.recipe for s in steps if s.round == number and isinstance(s.recipe, TrainingRecipe)]
    return [(r.policy_name, r.init_from, r.match_steps_of) for r in recipes]


def test_a_second_round_goes_on_from_the_last_policy_that_is_no_control(tmp_path: Path) -> None:
    assert [step.recipe for step in schedule(ALL, Run(tmp_path / "r"))] == ALL
    steps = schedule(ALL, Run(tmp_path / "r"), rounds=3)
    assert [step.stage for step in steps] == ["sample", "train", "train", "train", "eval"] * 3
    assert trained(steps, 1) == [("sft", "base", None), ("ipo", "sft", None), ("sft-more", "base", "ipo")]
    assert trained(steps, 2) == [("sft-2", "ipo", None), ("ipo-2", "sft-2", None), ("sft-more-2", "ipo", "ipo-2")]
    assert trained(steps, 3) == [("sft-3", "ipo-2", None), ("ipo-3", "sft-3", None), ("sft-more-3", "ipo-2", "ipo-3")]
    policies = [s.recipe.policy for s in steps if isinstance(s.recipe, SamplingRecipe)]
    assert [Path(p.model).name for p in policies] == ["demo", "ipo", "ipo-2"]
    assert [p.kind for p in policies] == ["local"] * 3


def test_a_served_policy_is_followed_by_a_local_one(tmp_path: Path) -> None:
    policy = {"kind": "openai", "model": "m", "urls": ["http://127.0.0.1:1/v1"]}
    served = SamplingRecipe.model_validate({"data": {"kind": "world"}, "policy": policy})
    steps = schedule([served, SFT.model_copy(update={"init_from": "weights"})], Run(tmp_path / "r"), rounds=2)
    second = steps[2].recipe
    assert isinstance(second, SamplingRecipe)
    assert second.policy.kind == "local"
    assert trained(steps, 2) == [("sft-2", "weights", None)]


def test_a_round_that_a_later_one_has_followed_is_done(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r")
    run.update(rounds=[{"digest": "a"}, {"digest": "b"}])
    assert [step.done for step in schedule([SAMPLING, SFT, EVAL], run, rounds=2)] == [False] * 6
    (run.policies / "sft").mkdir(parents=True)
    (run.policies / "sft" / "training.json").write_text(json.dumps({}))
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
def test_a_loop_that_cannot_be_is_refused(tmp_path: Path, recipes: list[Recipe], rounds: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        schedule(recipes, Run(tmp_path / "r"), rounds)
