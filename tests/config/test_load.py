from pathlib import Path

import pytest

from leret.cli.console import known_names
from leret.config.evaluation import EvalRecipe
from leret.config.load import load_all, load_recipe, sampling_recipe_of
from leret.config.sampling import SamplingRecipe
from leret.core import bundled
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.training.algorithms import TrainingRecipe

GOOD = """\
data: {kind: world}
policy:
  model: demo
program:
  adapter: {kind: compact}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*overrides, text=GOOD):
    Path("r.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    return load_recipe("r.yaml", SamplingRecipe, overrides, check=known_names())


def problems(*overrides, text=GOOD):
    with pytest.raises(ConfigError) as caught:
        read(*overrides, text=text)
    return caught.value.problems


def test_overrides_win_and_are_yaml():
    recipe = read("sampling.samples=3", "data.options={a: [1]}", "program.hops=3")
    assert (recipe.sampling.prompts, recipe.sampling.samples) == (4, 3)
    assert (recipe.data.options, recipe.program.arguments) == ({"a": [1]}, {"hops": 3})


def test_a_removed_key_is_left_out_only_where_it_has_its_default():
    assert read("sampling.gamma=1.0") == read()
    assert "unknown key" in problems("sampling.gamma=0.5")[0]
    assert "is not one of auto, step" in problems("sampling.credit=return")[0]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sampling={prompts: 1, samples: 1}", "--set sampling.samples"),
        ("policy={model: demo, temperature: 0}", "r.yaml:6: sampling.samples"),
        ("sampling={samples: 2, margin: 0.2}", "--set sampling.margin"),
        ("sampling={samples: 2, prompts: 12, bank: {candidates: 8}}", "--set sampling.prompts"),
        ("sampling={samples: 2, prompts: 1, hint: gold}", "--set sampling.prompts"),
        ("program.adapter.kind=chat", "--set program.adapter.kind"),
        ("data.corpus=r.yaml", "--set data.corpus"),
        ("data={kind: hotpotqa}", "--set data.questions"),
        ("data={kind: jsonl, questions: r.yaml}", "--set data.corpus"),
        ("data={kind: hotpotqa, questions: r.yaml, options: {n: 1}}", "--set data.options"),
        ("program.path=p.py", "--set program.path"),
        ("sampling={prompts: 1, samples: none}", "--set sampling.samples"),  # the fault itself, no combination of it
    ],
)
def test_impossible_combinations_are_refused(override, key):
    (found,) = problems(override, text=GOOD + "sampling: {samples: 2}\n")
    assert found.startswith(key)


def test_missing_files_are_listed_with_other_faults():
    text = """\
data: {kind: jsonl, corpus: c.jsonl, questions: q.jsonl}
policy: {model: m}
program: {path: "p.py:P"}
sampling: {bank: {path: bank}, samples: 0}
"""
    assert [p.split(" here or")[0] for p in problems(text=text)] == [
        "r.yaml:4: sampling.samples: must be greater than 0, got 0",
        "r.yaml:1: data.corpus: no corpus file 'c.jsonl'",
        "r.yaml:1: data.questions: no question file 'q.jsonl'",
        "r.yaml:2: policy.model: no model directory 'm'",
        "r.yaml:3: program.path: no program file 'p.py'",
        "r.yaml:4: sampling.bank.path: no directory of prompts 'bank'",
    ]


@pytest.mark.parametrize("place", ["", "around/recipes", "around"])
def test_paths_are_looked_up_around_the_recipe(folder, place):
    recipe = folder / "around/recipes/r.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("data: {kind: hotpotqa, questions: q.jsonl}\nprogram: {adapter: {kind: compact}}\n")
    (folder / place / "q.jsonl").touch()
    assert load_recipe(recipe, SamplingRecipe).data.questions == str(folder / place / "q.jsonl")


def test_some_paths_may_be_missing(folder):
    assert read("data={kind: hotpotqa, questions: 'hf:owner/name'}").data.questions == "hf:owner/name"
    assert read("policy.model=owner/name").policy.model == "owner/name"
    read("data={kind: jsonl, questions: r.yaml}", "retriever={kind: pubmed}")  # it has documents of its own
    recipe = load_recipe("r.yaml", SamplingRecipe, ["policy.model=new"], optional=("policy.model",))
    assert recipe.policy.model == str(folder / "new")
    assert recipe.program.path == f"{bundled.ROOT / 'pipelines' / 'multihop.py'}:MultiHop"


ALIASES = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
"""Nine levels of nine aliases: 387 million values in some 700 bytes."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing\n", "r.yaml: empty"),
        (GOOD + "data: {kind: world}\n", "r.yaml:6: data: set twice"),
        ("data:\n\tkind: world\n", "r.yaml:2: invalid YAML: a tab"),
        ("data: [\x01]\n", "not allowed in YAML"),
        ("data: {kind: \udcff}\n", "r.yaml: not UTF-8"),  # the byte ff
        ("data: " + "[" * 1000, "r.yaml: nested too deeply"),
        ("\n".join(["a0: &a0 lol", *ALIASES]), "too long"),
        ("data: !!python/object:os.system {}\n", "r.yaml:1: invalid YAML: could not determine a constructor"),
        ("data: world\n", "r.yaml:1: data: must be a section"),
        (GOOD.replace("model: demo", "top_p: 2"), "r.yaml:3: policy.top_p: must be at most 1.0, got 2"),
        ("algorithm: sft\n", "for `leret train`, not for `leret sample`"),
        ("policy: {kind: openai, model: m, urls: [3]}\n", "r.yaml:1: policy.urls[0]: must be text, got 3"),
        (GOOD + "retriever: {k2: 3}\n", "r.yaml:6: retriever.k2: unknown key; did you mean retriever.k1?"),
        (GOOD.replace("model: demo", "samples: 2"), "unknown key in this section; did you mean sampling.samples?"),
        ("data: {kind: jsnol, questions: r.yaml}\n", "r.yaml:1: data.kind: unknown"),
        (GOOD + "sampling: {reward: recal, samples: 0}\n", "r.yaml:6: sampling.reward: unknown"),
    ],
)
def test_faulty_file_is_refused_with_its_line(text, says):
    assert any(says in problem for problem in problems(text=text))


@pytest.mark.parametrize("override", ["sampling.samples", "=3", "a..b=3", "sampling.samples=[1", "policy.model.x=1"])
def test_malformed_overrides_are_refused(override):
    assert problems(override)[0].startswith(f"--set {override}: ")


WHOLE = f"""{GOOD}
train:
  - {{algorithm: sft, learning_rate: 1.0e-3}}
  - algorithm: ipo
    init_from: sft
eval:
  systems: [base]
"""


def test_overrides_go_to_the_stages_with_their_key():
    Path("r.yaml").write_text(WHOLE)
    sampling, sft, ipo, evaluation = load_all(["r.yaml"], ["seed=3", "sampling.seed=4", "limit=5"], known_names())
    assert isinstance(sampling, SamplingRecipe)
    assert isinstance(evaluation, EvalRecipe)
    assert (sft.algorithm, sft.learning_rate, ipo.init_from) == ("sft", 1e-3, "sft")
    assert (sampling.sampling.seed, sft.seed, ipo.seed, evaluation.seed, evaluation.limit) == (4, 3, 3, 3, 5)
    sampling, sft, ipo, evaluation = load_all(["r.yaml"], ["train.seed=6", "eval.limit=7"], known_names())
    assert (sft.seed, ipo.seed, evaluation.seed, evaluation.limit) == (6, 6, 0, 7)
    pickers = ["policies={pick: {kind: encoder}}", "policies.pick.hidden_size=8", "eval.policies.pick.model=demo"]
    sampling, *_, evaluation = load_all(["r.yaml"], pickers, known_names())
    assert (sampling.policies["pick"].hidden_size, evaluation.policies["pick"].kind) == (8, "local")
    assert load_recipe("r.yaml", EvalRecipe).systems == ("base",)
    assert load_recipe("r.yaml", SamplingRecipe).policy.model == "demo"
    with pytest.raises(ConfigError, match="2 recipes for `leret train`"):
        load_recipe("r.yaml", TrainingRecipe)
    Path("r.yaml").write_text(GOOD + "train: {algorithm: dpo}\neval: {}\n")
    assert load_recipe("r.yaml", TrainingRecipe).algorithm == "dpo"
    assert load_recipe("rerank", EvalRecipe) == load_recipe("sampling/rerank.yaml", EvalRecipe)


def test_faults_in_sections_have_their_lines():
    Path("r.yaml").write_text(WHOLE.replace("init_from", "init_form").replace("systems", "sistems"))
    with pytest.raises(ConfigError) as caught:
        load_all(["r.yaml"])
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == ["r.yaml:10", "r.yaml:12"]
    for text, says in (("train: sft", "r.yaml:6: train: 'sft' is not a recipe"), ("eval: 3", "r.yaml:6: eval: 3")):
        Path("r.yaml").write_text(f"{GOOD}{text}\n")
        with pytest.raises(ConfigError, match=says):
            load_all(["r.yaml"])


def test_unmatched_overrides_are_listed_with_other_faults():
    with pytest.raises(ConfigError) as caught:
        load_all(["sampling/demo.yaml", "training/demo-sft.yaml"], ["datum.limit=7", "data.limit=x", "lr=fast"])
    places = [problem.split(":")[0] for problem in caught.value.problems]
    assert places == ["--set data.limit", "--set datum.limit=7", "--set lr=fast"]


def test_recipe_of_another_version_is_refused_with_its_key(tmp_path):
    run = Run.create(tmp_path)
    recipe = load_recipe("sampling/demo.yaml", SamplingRecipe)
    section = recipe.model_dump(mode="json")
    run.update(sampling=section)
    assert sampling_recipe_of(run) == recipe
    run.update(sampling={**section, "program": {**section["program"], "adapter": {"kind": "compact", "minutes": None}}})
    with pytest.raises(RunError, match=r"run\.yaml: sampling: program\.adapter\.minutes: unknown key.*fix run"):
        sampling_recipe_of(run)
