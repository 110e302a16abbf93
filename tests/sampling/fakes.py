"""A policy, a retriever and a server, deterministic and without a model; data and a recipe for them."""

import asyncio
import json
import random
import sqlite3
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from leret.config.sampling import SamplingRecipe
from leret.core.errors import PolicyError, RetrievalError
from leret.core.runs import Run
from leret.core.types import Failure, Passage, Sample, Task
from leret.policies import load
from leret.policies.base import Completion
from leret.sampling.store.store import Store
from tests.http.servers import Served, serving

ROOT = Path(__file__).parents[2]

AWAY = {"error": {"message": "upstream is away"}}
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
"""A document a word; its text names the next one, so that a second hop has something to read."""

DOCS = {word: f"{word} leads to {WORDS[(i + 1) % len(WORDS)]}" for i, word in enumerate(WORDS)}


def events_of(run):
    return [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]


def questions(n=12):
    pairs = [(WORDS[i % 6], WORDS[(i + 1) % 6]) for i in range(n)]
    return [Task.question(f"q{i:02d}", f"what follows {gold[0]} number {i}", gold=gold) for i, gold in enumerate(pairs)]


def made(name, reward=None, **values):
    failure = Failure("parse", "") if reward is None else None
    fields = {"state_id": "s", "task_id": "q", "step": 0, "prompt": "0", "index": 0, "seed": 0, "completion": name}
    return Sample(id=name, reward=reward, **fields | {"failure": failure} | values)


class FakeRetriever:
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


def recipe_of(data=(), policy=(), program=None, **sampling):
    multihop = {"path": f"{ROOT}/pipelines/multihop.py:MultiHop", "hops": 2}
    bank = {"train_questions": 10, "dev_questions": 10, "candidates": 4, "max_demos": 2}
    files = {"kind": "jsonl", "corpus": "corpus.jsonl", "questions": "questions.jsonl", "split": "all"}
    return SamplingRecipe(
        data=files | dict(data),
        retriever={"k": 2, "stopwords": None},
        policy={"model": "fake", "max_tokens": 8} | dict(policy),
        program={"adapter": {"kind": "compact"}} | (program or multihop),
        sampling={"prompts": 3, "samples": 2, "seed": 1, "bank": bank, **sampling},
    )


def unsampled_run(path, recipe):
    """Return a run that begins with a sampling recipe, or with the sections of one."""
    run = Run.create(path)
    run.update(sampling=SamplingRecipe.model_validate(recipe).model_dump(mode="json"))
    run.held_out.write_text("[]")
    return run


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leret.policies.load.make_policy", lambda settings: policy)
        yield


def content(run):
    with Store(run.store, read_only=True) as store:
        return list(store.groups())


def change(run, sql, *values):
    """Change rows of a run's store."""
    with closing(sqlite3.connect(run.store)) as database:
        assert database.execute(sql, values).rowcount > 0
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def preferences(run):
    return (run.preferences / "train.parquet").read_bytes()


def served(server, **sampling):
    policy = {"kind": "openai", "model": "seeded", "urls": [server.url], "retry_for_s": 0, **sampling.pop("policy", {})}
    return recipe_of(policy=policy, **{"prompts": 1, "max_error_rate": 1.0, **sampling})


def blank(share):
    choice = {"index": 0, "message": {"content": " "}, "finish_reason": "stop"}
    return lambda body: {"choices": [choice]} if body.get("seed", 0) % 100 < 100 * share else {}


class SeededServer(Served):
    """OpenAI-compatible, in a thread; completions follow from messages and seed, one a request.

    ``broken`` says of a request's body whether it is refused, or how it is answered; ``lie`` what the answer changes.
    """

    def __init__(self):
        super().__init__()
        self.names, self.n_prompt_tokens, self.delay_s = ("seeded",), 10, 0.0
        self.asked, self.answered = Counter(), 0
        self.broken, self.lie = lambda body: False, lambda body: {}
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(serving(self, under="/v1")))
            self.close = stack.pop_all().close

    @property
    def n_asked(self):
        return sum(self.asked.values())

    async def route(self, request, body):
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": n, "object": "model"} for n in self.names]})
        is_sample = body["max_tokens"] > 1  # a probe asks for a single token
        self.asked[body.get("seed")] += is_sample
        await asyncio.sleep(self.delay_s)
        if broken := self.broken(body):
            refused = web.json_response({"error": {"message": "this question is refused"}}, status=400)
            return broken if isinstance(broken, web.Response) else refused
        self.answered += is_sample
        text = " ".join(random.Random(json.dumps([body["messages"], body.get("seed")])).choices(WORDS, k=2))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        n = self.n_prompt_tokens
        usage = {"prompt_tokens": n, "completion_tokens": 2, "total_tokens": n + 2}
        answer = {"object": "chat.completion", "model": "seeded", "choices": [choice], "usage": usage}
        return web.json_response(answer | self.lie(body))
