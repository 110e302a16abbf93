"""The shipped recipes: found by name, valid, commented, copied with their programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.load import find_recipe, load_all, load_recipe, stage_of
from leret.config.sampling import SamplingRecipe
from leret.core import bundled
from leret.core.errors import ConfigError
from leret.training.algorithms import TrainingRecipe

SHIPPED = [name for name in bundled.names() if name.endswith(".yaml")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_here_come_before_shipped_ones(folder: Path) -> None:
    for name in ("sampling/demo.yaml", "sampling/demo", "demo"):
        assert find_recipe(name, "sampling") == bundled.root() / "sampling" / "demo.yaml"
    (folder / "sampling").mkdir()
    (folder / "sampling/demo.yaml").write_text("# mine\n")
    assert find_recipe("sampling/demo.yaml") == Path("sampling/demo.yaml")
    for name, says in (
        ("nope", "leret recipes list"),
        ("hotptqa", r"sampling/hotpotqa\.yaml"),
        ("sampling", "directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            find_recipe(name, "sampling")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid_and_say_what_they_are_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundled.root())
    folder = name.partition("/")[0]
    assert stage_of(name) is {"sampling": SamplingRecipe, "training": TrainingRecipe, "eval": EvalRecipe}[folder]
    values = []
    if folder == "sampling" and "demo" not in name:
        values = ["data.questions=README.md", "data.corpus=README.md"]  # the user's own
        with pytest.raises(ConfigError, match=r"data\.questions is missing.*--set data\.questions=FILE.*leret init"):
            load_all([name])
    found: list[str] = []
    try:
        load_all([name], values)
    except ConfigError as error:
        found = error.problems
    assert [problem for problem in found if "no model directory" not in problem] == []
    text = (bundled.root() / name).read_text(encoding="utf-8")
    assert "../" not in text, "a path outside of the checkout"
    for word in ("# Purpose:", "# Prerequisites:", "# Command:", "# Expected time:"):
        assert word in text, f"{name} lacks {word}"
    assert bundled.purpose(name)
    if folder == "sampling":
        assert not [block for block in text.split("\n\n") if "#" not in block], "a section without a comment"


def test_copied_recipes_bring_their_programs_and_keep_what_is_there(folder: Path) -> None:
    (folder / "out" / "pipelines").mkdir(parents=True)
    (folder / "out" / "pipelines" / "multihop.py").write_text("# mine\n")
    written = bundled.copy("sampling/demo.yaml", folder / "out")
    assert folder / "out" / "sampling" / "demo.yaml" in written
    assert (folder / "out" / "pipelines" / "multihop.py").read_text() == "# mine\n"
    assert bundled.copy("sampling/demo.yaml", folder / "out") == []
    recipe = load_recipe("out/sampling/demo.yaml", SamplingRecipe)
    assert recipe.program.path == f"{folder / 'out' / 'pipelines' / 'multihop.py'}:MultiHop"
