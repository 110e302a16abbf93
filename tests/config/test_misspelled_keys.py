import pytest

from leret.cli.console import known_names
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.bundled import ROOT
from leret.core.errors import ConfigError
from leret.core.yaml import dotted, dump, load
from tests.core.test_bundled import STAGES, values_for

SHIPPED = sorted(path for stage in STAGES for path in (ROOT / stage).glob("*.yaml"))
FREE_NAMES = {"policies", "demos", "actors", "retrievers", "options", "inputs"}
"""Sections with names that the user chooses."""


def wrong_spelling(key):
    """Leave out a letter of a long key of even length, or double the last letter."""
    return key[:2] + key[3:] if len(key) > 4 and len(key) % 2 == 0 else key + key[-1]


def keys_in(value, section=()):
    for name, item in value.items():
        if section[-1:] != () and section[-1] in FREE_NAMES:
            yield from keys_in(item, (*section, name)) if isinstance(item, dict) else ()
            continue
        yield (*section, name)
        if isinstance(item, dict):
            yield from keys_in(item, (*section, name))


def misspelled(value, keys, section=()):
    """Return a recipe with each of these keys misspelled."""
    if not isinstance(value, dict):
        return value
    items = {}
    for name, item in value.items():
        key = (*section, name)
        items[wrong_spelling(name) if key in keys else name] = misspelled(item, keys, key)
    return items


def problems_in(file, model, overrides=()):
    try:
        load_recipe(file, model, overrides, check=known_names(), optional=("policy.model", "eval.questions"))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_misspelled_key_of_a_shipped_recipe_is_the_problem(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text, model = path.read_text(encoding="utf-8"), STAGES[path.parent.name]
    value = {name: item for name, item in load(text).items() if name not in {"train", "eval"}}
    values = values_for(text) if model is SamplingRecipe else []
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(value), encoding="utf-8")
    assert problems_in(file, model, values) == []
    # `python -m models` reads ``pretrain``; the program's constructor refuses unknown arguments
    keys = [key for key in keys_in(value) if len(key) == 1 or (key[:-1] != ("program",) and key[0] != "pretrain")]
    file.write_text(dump(misspelled(value, keys)), encoding="utf-8")
    problems = problems_in(file, model, values)
    assert len(problems) == len(keys), problems
    for key in keys:
        says = f"{dotted((*key[:-1], wrong_spelling(key[-1])))}: "
        found = [problem for problem in problems if problem.startswith(f"{file}:") and says in problem]
        assert any(f"did you mean {name}?" in problem for problem in found for name in (dotted(key), key[-1])), key


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [("policy.kind=featurs", "policy.kind", "features"), ("polcy.kind=features", "polcy", "policy"),
     ("retriever.kind=bm52", "retriever.kind", "bm25"), ("data.kind=jsnl", "data.kind", "jsonl"),
     ("program.adapter.kind=compat", "program.adapter.kind", "compact"),
     ("sampling.reward=MAP", "sampling.reward", "ap"), ("sampling.strategy=margn", "sampling.strategy", "margin"),
     ("policy.Temperature=2", "policy.Temperature", "policy.temperature"), ("polcy.top_k=2", "polcy", "policy"),
     ("sampling.reward={parts: {recall: 1, length: {ss: 2}}}", "sampling.reward.parts.length.ss", "s")],
)  # fmt: skip
def test_misspelled_kind_or_name_is_one_problem(override, key, near, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = ["data.questions=README.md", "data.corpus=README.md"]
    [problem] = problems_in(ROOT / "sampling/expand-pick.yaml", SamplingRecipe, [*files, override])
    assert problem.startswith(f"--set {key}: ")
    assert f"did you mean {near}?" in problem
