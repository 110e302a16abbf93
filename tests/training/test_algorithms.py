"""Algorithms and engines that a recipe names by path."""

import re

import pytest

from leret.training.algorithms import TrainingRecipe
from tests.first_steps import refused, succeeds
from tests.sampling.fakes import ROOT
from tests.training.rounds.conftest import run  # noqa: F401
from tests.training.training_runs import weights_of

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
[REINFORCE] = [text for text in BLOCKS if "REINFORCE" in text]
ENGINE = """
from leret.training.rounds.grpo import GRPO, GRPOKeys


class OwnGRPO(GRPOKeys, WritingRecipe):
    engine: str
    factor: float = 2.0


ENGINE = {"grpo": replace(GRPO, settings=OwnGRPO)}
"""

KEYS = {"learning_rate": "1e-3", "max_steps": 2, "logging_steps": 1, "max_completion_length": 6, "device": "cpu"}
SETS = [f"--set={name}={value}" for name, value in KEYS.items()]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(REINFORCE + ENGINE)
    return path


def test_an_algorithm_in_a_users_file_trains(run, base, file):  # noqa: F811
    command = ["train", f"{file}:REINFORCE", "--run", str(run.path), *SETS]
    succeeds(*command, "--set=scale=0.5")
    trained = run.policies / "reinforce"
    assert weights_of(trained) != weights_of(base)
    assert "trained with leret: REINFORCE." in (trained / "README.md").read_text()
    assert "tags: [leret, trl, REINFORCE]" in (trained / "README.md").read_text()
    file.write_text((REINFORCE + ENGINE).replace("-now.logps * batch", "-2 * now.logps * batch"))
    assert "algorithm: its content has changed" in refused(*command, "--set=scale=0.5")


def test_an_engine_in_a_users_file_trains(run, file, tmp_path):  # noqa: F811
    (tmp_path / "recipe.yaml").write_text("algorithm: grpo\nengine: own.py:ENGINE\nfactor: 3\n")
    succeeds("train", str(tmp_path / "recipe.yaml"), "--run", str(run.path), *SETS)
    assert (run.policies / "grpo").is_dir()
    recipe = TrainingRecipe.model_validate({"algorithm": "grpo", "engine": f"{file}:ENGINE"})
    assert recipe.factor == 2.0
    (tmp_path / "recipe.yaml").write_text("algorithm: ppo\nengine: own.py:ENGINE\n")
    assert "does not train ppo" in refused("train", str(tmp_path / "recipe.yaml"), "--run", str(run.path))
