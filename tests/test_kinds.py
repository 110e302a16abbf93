import json
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from leret.config.policy import PolicySettings
from leret.config.retriever import IndexedSettings
from leret.core.runs import Run
from leret.core.types import Document, Task
from leret.datasets.formats import READERS
from leret.datasets.formats.base import FileReader
from leret.policies.load import POLICIES, PolicyKind
from leret.retrieval.base import CallableRetriever
from leret.retrieval.index.manifest import IndexEngine
from leret.retrieval.load import ENGINES, EngineKind
from leret.rewards import REWARDS
from tests.first_steps import succeeds
from tests.sampling.fakes import DOCS, WORDS, FakePolicy, content

RECIPE = """
data: {kind: toy, questions: questions.json, corpus: corpus.json, split: all}
retriever: {kind: toy, k: 2, letters: 3}
policy: {kind: toy, model: words}
program: {path: "pipelines/multihop.py:MultiHop", adapter: {kind: compact}}
sampling: {prompts: 1, samples: 4, reward: {parts: {short@10: 1.0}}}
"""


def short(outcome, k=10):
    return float(len(outcome.text) <= k)


TOY_READER = FileReader(
    task=lambda record: Task.question(record["ask"], record["ask"], gold=tuple(record["need"])),
    in_record=lambda record: [Document(record["word"], record["word"].title(), record["says"])],
    marks=("ask", "word"),
)


class ToySettings(IndexedSettings):
    kind: Literal["toy"] = "toy"
    letters: int = 1


class ToyRetriever(CallableRetriever):
    def __init__(self, documents, settings):
        self.documents = documents.passages(range(len(documents)), [1.0] * len(documents))
        self.letters = settings.letters
        self.digest = ToyIndex(settings).digest(documents.digest)

    def search(self, queries, k):
        starts = [query[: self.letters] for query in queries]
        return [tuple(one for one in self.documents if one.text.startswith(start))[:k] for start in starts]


@dataclass(frozen=True)
class ToyIndex(IndexEngine):
    settings: ToySettings
    kind: ClassVar[str] = "toy"

    @classmethod
    def from_manifest(cls, manifest, directory):
        return cls(ToySettings(**manifest.settings))

    def ranking_keys(self):
        return self.settings.ranking_keys()

    def write(self, corpus, directory, progress):
        (directory / "toy.txt").write_text(str(len(corpus)))

    def open(self, directory, documents):
        return ToyRetriever(documents, self.settings)


class ToyPolicySettings(PolicySettings):
    kind: Literal["toy"] = "toy"


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "corpus.json").write_text(json.dumps([{"word": word, "says": text} for word, text in DOCS.items()]))
    asked = [{"ask": f"find {word}", "need": [word]} for word in WORDS]
    (folder / "questions.json").write_text(json.dumps(asked))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "leret.retrieval.engines.toy", sys.modules[__name__])  # the file of the engine
        patch.setitem(REWARDS, "short", short)
        patch.setitem(READERS, "toy", TOY_READER)
        patch.setitem(ENGINES, "toy", EngineKind(ToySettings, "engines.toy:ToyIndex", "index"))
        patch.setitem(POLICIES, "toy", PolicyKind(ToyPolicySettings, lambda settings: FakePolicy()))
        succeeds("sample", "recipe.yaml", "--run", "run")
        yield content(Run.open(folder / "run"))


def test_a_toy_of_every_kind_is_used(sampled):
    samples = [one for group in sampled for one in group.samples]
    assert {group.state.inputs["question"] for group in sampled} == {f"find {word}" for word in WORDS}
    assert all(one.reward == float(len(one.completion) <= 10) for one in samples)
    assert {one.reward for one in samples} == {0.0, 1.0}
    assert all(one.doc_ids == (one.completion.split()[0],) for one in samples if one.step == 0)
