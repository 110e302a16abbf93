"""Recipes: YAML with places, overrides, files, combinations; every fault at once, with its place and its mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leret.cli.console import known_names
from leret.config.evaluation import EvalRecipe
from leret.config.load import load_all, load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core import bundled
from leret.core.errors import ConfigError
from leret.training.algorithms import TrainingRecipe

GOOD = """\
data: {kind: world}
policy:
  model: demo
program:
  adapter: {kind: compact}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "r.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path.relative_to(folder))


def read(folder: Path, *overrides: str, text: str = GOOD) -> SamplingRecipe:
    return load_recipe(write(folder, text), SamplingRecipe, overrides)


def problems(folder: Path, *overrides: str, text: str = GOOD) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, *overrides, text=text)
    return caught.value.problems


def test_overrides_win_and_are_yaml(folder: Path) -> None:
    recipe = read(folder, "sampling.samples=3", "data.options={a: [1]}", "program.hops=3")
    assert (recipe.sampling.prompts, recipe.sampling.samples) == (4, 3)
    assert recipe.data.options == {"a": [1]}
    assert recipe.program.arguments == {"hops": 3}


def test_faults_are_listed_together_with_their_places(folder: Path) -> None:
    text = GOOD.replace("model: demo", "modle: demo\n  top_p: 2\n  max_tokens: many") + "sampling: {samples: none}\n"
    found = problems(folder, "retriever.kk=3", "sampling.margin=0.2", text=text)
    places = ["r.yaml:3: policy.modle", "r.yaml:4: policy.top_p", "r.yaml:5: policy.max_tokens",
              "r.yaml:8: sampling.samples", "--set retriever.kk", "--set sampling.margin"]  # fmt: skip
    for place in places:
        assert sum(problem.startswith(f"{place}: ") for problem in found) == 1
    assert len(found) == len(places)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("retriever.kk=3", "retriever.k?"),
        ("retriever.k2=3", "retriever.k1?"),
        ("policy.samples=2", "sampling.samples?"),
        ("sampling.strategy=al", "all?"),
        ("nothing.like_it=1", "known here: data"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(folder: Path, override: str, says: str) -> None:
    (found,) = problems(folder, override)
    assert says in found


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sampling={prompts: 1, samples: 1}", "sampling.samples"),
        ("sampling={samples: 2}", None),
        ("sampling.margin=0.2", "sampling.margin"),
        ("sampling.prompts=12", "sampling.prompts"),
        ("program.adapter.kind=chat", "program.adapter.kind"),
        ("data.corpus=r.yaml", "data.corpus"),
        ("data={kind: hotpotqa}", "data.questions"),
        ("data={kind: jsonl, questions: r.yaml}", "data.corpus"),
        ("data={kind: hotpotqa, questions: r.yaml, options: {n: 1}}", "data.options"),
        ("program.path=p.py", "program.path"),
        ("sampling={prompts: 1, samples: none}", "sampling.samples"),  # the fault itself, no combination of it
    ],
)
def test_impossible_combinations_are_refused(folder: Path, override: str, key: str | None) -> None:
    if key is None:  # fine at a temperature; at 0 the samples would be the same
        override, key = "policy={model: demo, temperature: 0}", "sampling.samples"
        read(folder, override)
        (found,) = problems(folder, override, "sampling.samples=2")
    else:
        (found,) = problems(folder, override)
    assert f"{key}" in found.split(": ")[0] + found.split(": ")[1]


def test_a_server_has_documents_of_its_own(folder: Path) -> None:
    read(folder, "data={kind: jsonl, questions: r.yaml}", "retriever={kind: pubmed}")


def test_missing_files_are_listed_beside_other_faults(folder: Path) -> None:
    text = """\
data: {kind: jsonl, corpus: c.jsonl, questions: q.jsonl}
policy: {model: m}
program: {path: "p.py:P"}
sampling: {bank: {path: bank}, samples: 0}
"""
    found = problems(folder, text=text)
    assert [p.split(" here or")[0] for p in found] == [
        "r.yaml:4: sampling.samples: must be greater than 0, is 0",
        "r.yaml:1: data.corpus: no corpus file 'c.jsonl'",
        "r.yaml:1: data.questions: no question file 'q.jsonl'",
        "r.yaml:2: policy.model: no model directory 'm'",
        "r.yaml:3: program.path: no program file 'p.py'",
        "r.yaml:4: sampling.bank.path: no directory of prompts 'bank'",
    ]


@pytest.mark.parametrize("place", ["", "recipes", "around"])
def test_paths_are_found_here_beside_and_around_the_recipe(folder: Path, place: str) -> None:
    text = "data: {kind: hotpotqa, questions: q.jsonl}\nprogram: {adapter: {kind: compact}}\n"
    recipe = write(folder, text, "around/recipes/r.yaml")
    target = folder / {"": "", "recipes": "around/recipes", "around": "around"}[place] / "q.jsonl"
    target.write_text("")
    assert load_recipe(recipe, SamplingRecipe).data.questions == str(target)


def test_paths_that_need_not_be_there(folder: Path) -> None:
    recipe = load_recipe(write(folder, GOOD.replace("demo", "new")), SamplingRecipe, optional=("policy.model",))
    assert recipe.policy.model == str(folder / "new")
    assert recipe.program.path == f"{bundled.root() / 'pipelines' / 'multihop.py'}:MultiHop"
    assert read(folder, "data={kind: hotpotqa, questions: 'hf:owner/name'}").data.questions == "hf:owner/name"
    assert read(folder, "policy.model=owner/name").policy.model == "owner/name"


def aliases(start: str, end: str, first: str = "lol") -> str:
    """Nine levels of nine aliases: 387 million values in some 700 bytes."""
    levels = [f"a0: &a0 {first}"]
    levels += [f"a{n}: &a{n} {start}{', '.join([f'*a{n - 1}'] * 9)}{end}" for n in range(1, 10)]
    return "\n".join(levels) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing\n", "r.yaml: empty"),
        ("- a\n- b\n", "r.yaml:1: a recipe is made of"),
        (GOOD + "data: {kind: world}\n", "r.yaml:6: data: given twice"),
        ("data:\n\tkind: world\n", "r.yaml:2: not YAML: a tab"),
        ("data: {kind: world\npolicy: 3\n", "r.yaml:2: not YAML"),
        ("data: [\x01]\n", "not allowed in YAML"),
        ("data: " + "[" * 60 + "]" * 60 + "\n", "r.yaml:1: nested too deeply"),
        ("data: " + "[" * 1000, "r.yaml: nested too deeply"),
        (aliases("[", "]"), "too long"),
        ("data: !!python/object:os.system {}\n", "r.yaml:1: not YAML: the tag"),
        ("1: 2\ndata: {kind: world}\n", "r.yaml:1: the key 1 must be text"),
        ("data: 2024-13-45\n", "not YAML: month must be in 1..12"),
        ("data: world\n", "r.yaml:1: data: must be a section"),
        ("algorithm: sft\n", "for `leret train`, not for `leret sample`"),
        ("retriever: {k: 3}\n", "data: missing"),
        ("policy: {kind: openai, model: x}\ndata: {kind: world}\n", "policy.urls"),
        ("policy: {kind: openai, model: m, urls: [3]}\n", "r.yaml:1: policy.urls[0]: must be text, is 3"),
    ],
)
def test_what_is_no_recipe_is_named_with_its_line(folder: Path, text: str, says: str) -> None:
    assert any(says in problem for problem in problems(folder, text=text))


def test_a_file_that_is_not_utf_8_is_refused(folder: Path) -> None:
    (folder / "r.yaml").write_bytes(b"data: {kind: \xff}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml: not a text file in UTF-8"):
        load_recipe("r.yaml", SamplingRecipe)


@pytest.mark.parametrize("override", ["sampling.samples", "=3", "a..b=3", "sampling.samples=[1", "policy.model.x=1"])
def test_overrides_that_cannot_be_read_are_refused(folder: Path, override: str) -> None:
    assert problems(folder, override)[0].startswith(f"--set {override}: ")


def test_the_loop_takes_short_names_in_the_order_of_its_stages() -> None:
    loaded = load_all(["demo", "demo-sft", "demo-ipo", "demo"], ["data.limit=7", "seed=5"])
    sampling, *training, evaluation = loaded
    assert isinstance(sampling, SamplingRecipe)
    assert all(isinstance(recipe, TrainingRecipe) for recipe in training)
    assert isinstance(evaluation, EvalRecipe)
    assert (sampling.data.limit, *(recipe.seed for recipe in loaded[1:] if not isinstance(recipe, SamplingRecipe))) == (
        7, 5, 5, 5
    )  # fmt: skip
    assert sampling == load_recipe("sampling/demo.yaml", SamplingRecipe, ["data.limit=7"])
    assert isinstance(load_all(["sampling/demo.yaml", "hotpotqa"])[1], EvalRecipe)


def test_overrides_that_no_recipe_takes_are_told_with_all_else() -> None:
    with pytest.raises(ConfigError) as caught:
        load_all(["sampling/demo.yaml", "training/demo-sft.yaml"], ["datum.limit=7", "data.limit=x", "lr=fast"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--set data.limit", "--set datum.limit=7", "--set lr=fast"
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("2", 2.0), (".5", 0.5)])
def test_numbers_are_those_of_yaml_1_2(folder: Path, text: str, value: Any) -> None:
    recipe = load_recipe(write(folder, f"algorithm: sft\nlearning_rate: {text}\n"), TrainingRecipe)
    assert recipe.learning_rate == value


def test_names_that_the_tables_lack_are_listed_with_the_other_faults(folder: Path) -> None:
    text = GOOD.replace("kind: world", "kind: jsnol, questions: r.yaml") + "sampling: {reward: recal, samples: 0}\n"
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(folder, text), SamplingRecipe, check=known_names())
    found = [problem.split(": unknown")[0] for problem in caught.value.problems]
    assert found[1:] == ["r.yaml:1: data.kind", "r.yaml:6: sampling.reward"]
    assert found[0].startswith("r.yaml:6: sampling.samples")
