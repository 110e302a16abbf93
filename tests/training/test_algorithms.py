"""Shipped algorithms; and algorithms and engines that a recipe names by path."""

import re

import pytest

from leret.config.load import load_recipe
from leret.core.errors import ConfigError
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
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
    (tmp_path / "recipe.yaml").write_text("algorithm: ppo\nengine: own.py:ENGINE\n")
    assert "does not train ppo" in refused("train", str(tmp_path / "recipe.yaml"), "--run", str(run.path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: ipa\n", "algorithm: 'ipa' is not one of sft, dpo, ipo, .*; did you mean ipo"),
        ("algorithm: sft\nbeta: 1\n", "beta: unknown key for this kind .known for dpo, ipo, .*; remove it"),
        ("algorithm: sft\nwarmup_ratio: 0.1\nwarmup_steps: 5\n", "cannot both be set"),
        ("algorithm: ipo\nlosses: {ipo: 0}\n", "losses.ipo: .*greater than 0"),
        ("algorithm: sft\nlora: {quantization: nf4}\n", "nf4 needs bfloat16; set dtype: bfloat16 too"),
        ("algorithm: sft\nreport_to: [mlflow]\n", "trackio"),
        ("algorithm: sft\neval_split: test\n", "eval_split: 'test' is not one of dev, train"),
        ("algorithm: sft\nname: a/b\n", "cannot name a policy"),
        ("algorithm: sft\nname: mine\ninit_from: mine\n", "mine would start from itself"),
        ("algorithm: pqn\nlr_scheduler_type: linear\n", "min_lr_rate"),
        ("algorithm: grpo\nserved: true\n", "set lora too"),
        ("algorithm: grpo\nengine: trl\nstates: live\n", "states: .* stored"),
        ("algorithm: sft\nengine: leret\n", "engine leret does not train sft"),
        ("algorithm: distill\nestimator: sampled\ndivergence: jsd\n", "estimator: sampled estimates the reverse KL"),
        ("algorithm: distill\nteacher: self\n", "set hint: gold"),
        ("algorithm: distill\nhint: gold\ngroups: question\n", "remove groups"),
        ("algorithm: distill\nteacher: {model: x, urls: ['http://x/v1']}\n", "full needs .* set estimator: sampled"),
        ("algorithm: pick\nloss: kl\nentropy_coef: 0.1\nscale_rewards: batch\n", "scale_rewards or entropy_coef"),
        ("algorithm: pick\nreward_temperature: 1.0\n", "grpo does not read reward_temperature"),
        ("algorithm: pick\nloss: kl\ngroups: question\n", "kl compares the picks of a state"),
        ("algorithm: joint\nlearning_rate: 0.1\n", "is a key of each actor; set picker.learning_rate or writer"),
        ("algorithm: joint\npicker: {limit: 3}\n", "picker.limit applies to both actors"),
        ("algorithm: joint\npicker: {top_p: 0.9}\n", "picker.top_p"),
        ("algorithm: joint\nwriter: {engine: trl, states: stored}\n", "writer.states applies to both|writer.engine"),
        ("algorithm: joint\ncredit: step\n", "remove groups, states, credit"),
        ("algorithm: joint\npicker: {num_generations: 1}\nwriter: {num_generations: 1}\n", "nothing to compare"),
    ],
)
def test_keys_that_an_algorithm_or_engine_does_not_take_are_refused(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "r.yaml", TrainingRecipe)


@pytest.mark.parametrize("name", [*ALGORITHMS, "retriever-kl"])
def test_shipped_recipes_name_every_key_with_a_comment_and_keys_of_rounds_with_their_default(name):
    path, settings = ROOT / "training" / f"{name}.yaml", TrainingRecipe.find(name).settings
    keys = set(settings.model_fields)
    named = {word for line in path.read_text("utf-8").splitlines()[4:] for word in re.findall(r"\w+", line)}
    without = {"match_steps_of", "warmup_steps"}
    if name == "retriever-kl":  # refuses validation
        without |= {"eval_steps", "eval_split", "eval_tasks", "metric_for_best_model"}
    assert keys - named - without == set()
    if TrainingRecipe.find(name).is_online:
        shipped, default = load_recipe(str(path), TrainingRecipe, ()), settings()
        own = keys - TrainingRecipe.model_fields.keys()
        assert {key for key in own if getattr(shipped, key) != getattr(default, key)} == set()
