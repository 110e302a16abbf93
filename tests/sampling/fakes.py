"""A policy and a retriever of twenty lines each, deterministic and without a model; data and a recipe for them."""

import asyncio
import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.errors import PolicyError, RetrievalError
from leret.core.types import Failure, Passage, Sample, Task
from leret.policies import load
from leret.policies.base import Completion
from leret.sampling.store.store import Store

ROOT = Path(__file__).parents[2]

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
"""A document a word; its text names the next one, so that a second hop has something to read."""

DOCS = {word: f"{word} leads to {WORDS[(i + 1) % len(WORDS)]}" for i, word in enumerate(WORDS)}


def questions(n=12):
    """Questions whose gold is two neighbouring words."""
    return [
        Task.question(f"q{i:02d}", f"what follows {WORDS[i % 6]} number {i}", gold=(WORDS[i % 6], WORDS[(i + 1) % 6]))
        for i in range(n)
    ]


def made(name, reward=None, **values):
    """A sample; one without a reward did not parse."""
    failure = Failure("parse", "") if reward is None else None
    fields = {"state_id": "s", "question_id": "q", "step": 0, "prompt": "0", "index": 0, "seed": 0, "completion": name}
    return Sample(id=name, reward=reward, **fields | {"failure": failure} | values)


class FakeRetriever:
    """A document scores by how many of the query's words are in it."""

    digest = "fake-retriever"

    def __init__(self, broken=()):
        self.broken = set(broken)
        self.batches = []

    def search(self, queries, k):
        self.batches.append(list(queries))
        if any(word in query for query in queries for word in self.broken):
            raise RetrievalError("the index is away")
        return [self._one(query, k) for query in queries]

    def _one(self, query, k):
        words = query.split()
        scores = {d: sum(words.count(w) * (2 if w == d else 1) for w in t.split()) for d, t in DOCS.items()}
        best = sorted((d for d in scores if scores[d]), key=lambda d: (-scores[d], d))[:k]
        return tuple(Passage(d, d.title(), DOCS[d], float(scores[d])) for d in best)


class FakePolicy:
    """Writes two words that depend on the messages and the seed alone."""

    name = "fake"
    digest = "fake-policy"

    def __init__(self, fail=lambda request: False, junk=0.0, delay_s=0.0):
        self.fail, self.junk, self.delay_s = fail, junk, delay_s
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        if failed := self.fail(request):
            raise failed if isinstance(failed, Exception) else PolicyError("the server is away")
        return [self._one(request, seed) for seed in request.seeds]

    def _one(self, request, seed):
        rng = random.Random(f"{request.messages}|{seed if request.temperature else 0}")
        text = "" if rng.random() < self.junk else " ".join(rng.choices(WORDS, k=2))
        return Completion(text, "stop", sum(len(m["content"].split()) for m in request.messages), 2)

    async def aclose(self):
        pass


def write_data(directory, n=30):
    corpus = [{"doc_id": word, "title": word.title(), "text": text} for word, text in DOCS.items()]
    asked = [{"id": q.id, "question": q.text, "answer": "", "relevant_doc_ids": list(q.gold)} for q in questions(n)]
    for name, rows in (("corpus", corpus), ("questions", asked)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(data=(), policy=(), **sampling):
    bank = {"train_questions": 10, "dev_questions": 10, "candidates": 4, "max_demos": 2}
    files = {"kind": "jsonl", "corpus": "corpus.jsonl", "questions": "questions.jsonl", "split": "all"}
    recipe = {
        "data": files | dict(data),
        "retriever": {"k": 2, "stopwords": None},
        "policy": {"model": "fake", "max_tokens": 8} | dict(policy),
        "program": {"path": f"{ROOT}/pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
        "sampling": {"prompts": 3, "samples": 2, "seed": 1, "bank": bank, **sampling},
    }
    return SamplingRecipe.model_validate(recipe)


def open_fakes(patch):
    """Let `make_policy` make fakes of local policies; returns those that it made."""
    made, served_policy = [], load.make_policy

    def make_policy(settings):
        if settings.kind != "local":
            return served_policy(settings)
        made.append(FakePolicy())
        made[-1].digest = f"{settings.model}-policy"
        return made[-1]

    patch.setattr("leret.policies.load.make_policy", make_policy)
    return made


@contextmanager
def policy_is(policy):
    """Let `make_policy` open this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leret.policies.load.make_policy", lambda settings: policy)
        yield


def content(run):
    with Store(run.store, read_only=True) as store:
        return list(store.groups())


def preferences(run):
    return (run.preferences / "train.parquet").read_bytes()
