"""Kinds that recipes name by path: a data reader, a retriever and a policy, from a file and from a package."""

import json
import re

import pytest

from leret.config.base import free_keys
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, RetrievalError
from leret.core.runs import Run
from leret.policies.load import compute_digest, make_policy
from leret.retrieval.load import open_index
from leret.rollouts.environment import Environment
from tests.first_steps import edit, refused, succeeds
from tests.sampling.fakes import DOCS, ROOT, WORDS, content

[KINDS, _] = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
INDEX = """
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

from leret.config.base import Free
from leret.config.retriever import EngineSettings
from leret.retrieval.index.manifest import IndexEngine


class ToySettings(EngineSettings):
    letters: int = 1
    threads: Annotated[int, Free()] = 1


@dataclass(frozen=True)
class ToyIndex(IndexEngine):
    settings: ToySettings

    def write(self, corpus, directory, progress):
        (directory / "toy.txt").write_text(str(len(corpus)))

    def open(self, directory, documents):
        passages = documents.passages(range(len(documents)), [1.0] * len(documents))
        opened = Prefix(self.settings, SimpleNamespace(values=lambda: passages, digest=documents.digest))
        opened.digest = self.digest(documents.digest)
        return opened


RETRIEVER = EngineKind(ToySettings, ToyIndex, "index")


def short(outcome, k=10):
    return float(len(outcome.text) <= k)
"""
TOYS = KINDS + INDEX
"""The kinds of CONTRIBUTING.md, with a retriever that has an index, and a reward."""

RECIPE = """
data: {{kind: "{0}:READER", questions: questions.json, corpus: corpus.json, split: all}}
retriever: {{kind: "{0}:RETRIEVER", k: 2, letters: 3}}
policy: {{kind: "{0}:POLICY", model: words}}
program: {{path: "pipelines/multihop.py:MultiHop", adapter: {{kind: compact}}}}
sampling: {{prompts: 1, samples: 4, reward: {{parts: {{"{0}:short": 1.0}}}}}}
"""


def write(folder, named, file, text=TOYS):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    (folder / "recipe.yaml").write_text(RECIPE.format(named))
    (folder / "corpus.json").write_text(json.dumps([{"word": word, "says": text} for word, text in DOCS.items()]))
    asked = [{"ask": f"find {word}", "need": [word]} for word in WORDS]
    (folder / "questions.json").write_text(json.dumps(asked))


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """The file of the toys, beside a recipe that names them."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lib" / "toys.py"
    write(tmp_path, "lib/toys.py", file)
    return file


def test_kinds_named_by_path_are_used_and_their_code_is_part_of_the_run(toys, tmp_path):
    succeeds("sample", "recipe.yaml", "--run", "run")
    groups = content(Run.open(tmp_path / "run"))
    samples = [sample for group in groups for sample in group.samples]
    assert {group.state.inputs["question"] for group in groups} == {f"find {word}" for word in WORDS}
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    for sample in samples:
        starts = tuple(word for word in WORDS if word.startswith(sample.completion[:3]))
        assert sample.step > 0 or sample.doc_ids == starts
    assert any(sample.doc_ids for sample in samples)
    manifest = Run.open(tmp_path / "run").manifest
    [index] = (tmp_path / "run" / "cache").glob("*/manifest.json")
    with pytest.raises(RetrievalError, match="runs only if a recipe names it"):
        open_index(index.parent)

    succeeds("sample", "recipe.yaml", "--run", "run", "--set", "retriever.threads=2")
    (tmp_path / "eval.yaml").write_text(
        "{split: all, questions: new.json, systems: [raw-question, base], resamples: 20}"
    )
    (tmp_path / "new.json").write_text(json.dumps([{"ask": f"seek {word}", "need": [word]} for word in WORDS]))
    succeeds("eval", "eval.yaml", "--run", "run")
    with toys.open("a") as file:
        file.write("# changed\n")
    assert "reader: its content has changed" in refused("sample", "recipe.yaml", "--run", "run")
    with Environment(Environment.open(Run.open(tmp_path / "run")).recipe, tmp_path / "cache") as environment:
        assert environment.retriever.digest != manifest.digests["retriever"]
        policy = environment.recipe.policy
        assert compute_digest(policy) == make_policy(policy).digest != manifest.policy_digest


def test_kinds_of_a_package_are_used_and_their_index_is_opened_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    write(tmp_path, "toy_package.kinds", tmp_path / "site" / "toy_package" / "kinds.py")
    succeeds("sample", "recipe.yaml", "--run", "run")
    [index] = (tmp_path / "run" / "cache").glob("*/manifest.json")
    assert open_index(index.parent).digest == Run.open(tmp_path / "run").manifest.digests["retriever"]


def test_the_kinds_in_contributing_can_be_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "kinds.py", tmp_path / "kinds.py", KINDS)
    reward = ["--set", "sampling.reward=recall"]
    succeeds("sample", "recipe.yaml", "--run", "run", *reward, "--set", "policy.words=3")
    samples = [sample for group in content(Run.open(tmp_path / "run")) for sample in group.samples]
    assert {len(sample.completion.split()) for sample in samples} == {3}
    assert any(sample.doc_ids for sample in samples)


def test_keys_and_marks_of_a_kind_named_by_path_hold_for_its_recipe_only(toys, tmp_path):
    recipe = load_recipe("recipe.yaml", SamplingRecipe)
    assert "retriever.threads" in free_keys(recipe)
    assert "retriever.letters" not in free_keys(recipe)
    assert "retriever.threads" not in free_keys(SamplingRecipe)

    edit("recipe.yaml", "letters: 3", "leters: 3")
    edit("recipe.yaml", "model: words", "model: w, words: x")
    with pytest.raises(ConfigError) as error:
        load_recipe("recipe.yaml", SamplingRecipe)
    typo, wrong = error.value.problems
    assert "recipe.yaml:3: retriever.leters: unknown key; did you mean retriever.letters?" in typo
    assert "recipe.yaml:4: policy.words: must be a whole number, got 'x'" in wrong


WRONG = {
    "absent.py:TOY": "absent.py cannot be loaded: no such file; fix it, or name the kind as FILE.py:NAME",
    "no_such_package.kinds:TOY": "no_such_package.kinds cannot be loaded",
    "lib/toys.py:TOY": "has no kind 'TOY'; available: RETRIEVER",
}


def test_a_path_without_a_kind_of_the_family_is_told(toys, tmp_path):
    text = (tmp_path / "recipe.yaml").read_text()
    for kind, says in WRONG.items():
        (tmp_path / "recipe.yaml").write_text(text.replace("lib/toys.py:RETRIEVER", kind))
        with pytest.raises(ConfigError) as error:
            load_recipe("recipe.yaml", SamplingRecipe)
        [problem] = error.value.problems
        assert problem.startswith("recipe.yaml:3: retriever.kind: ")
        assert says in problem
