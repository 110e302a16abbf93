"""A retrieval server that is killed in the middle of `leret sample`: the run waits, goes on, and is the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from leret.config.data import DataSettings
from leret.config.retriever import RemoteSettings
from leret.config.sampling import SamplingRecipe
from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.core.runs import Run
from leret.core.types import Sample
from leret.datasets.load import load_corpus
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.load import load_retriever
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.retrieval.serving import Reply, loopback, served
from tests.sampling.fakes import FakePolicy, questions, write_data

ROOT = Path(__file__).resolve().parents[2]


class Slow(FakePolicy):
    """Leaves time for something to go wrong."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.01)


class OnProgress(Silent):
    """Calls a function once ``n`` questions are done."""

    def __init__(self, n: int, call: Any) -> None:
        self.left, self.call = n, call

    def advance(self, n: int = 1, **facts: Any) -> None:
        self.left -= n
        if self.left <= 0 and self.call is not None:
            call, self.call = self.call, None
            call()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_data(tmp_path)
    corpus = load_corpus(DataSettings(questions=str(tmp_path / "corpus.jsonl"), corpus=str(tmp_path / "corpus.jsonl")))
    BM25.build(corpus, tmp_path / "index", stopwords=None)
    monkeypatch.setenv("LERET_CACHE_DIR", str(tmp_path / "answers"))
    monkeypatch.setattr("leret.policies.load.make_policy", lambda settings: Slow())
    return tmp_path


def recipe(retriever: dict[str, Any]) -> SamplingRecipe:
    return SamplingRecipe.model_validate(
        {
            "data": {"kind": "jsonl", "corpus": "corpus.jsonl", "questions": "questions.jsonl", "split": "all"},
            "retriever": {"k": 2, **retriever},
            "policy": {"model": "fake", "max_tokens": 8},
            "program": {"path": f"{ROOT}/pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
            "sampling": {"prompts": 1, "samples": 4, "seed": 1, "concurrency": 4},
        }
    )


def remote(url: str, retry_for_s: float) -> dict[str, Any]:
    settings = {"urls": [url], "retry_for_s": retry_for_s, "timeout_s": 10}
    return {"kind": "remote", **settings, "cache": {"use": "off"}}


@pytest.mark.parametrize("protocol", ["leret", "colbert", "colbert-get", "retrieve"])
def test_a_url_of_no_retriever_is_told_before_an_lm_is_asked(
    protocol: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = FakePolicy()
    monkeypatch.setattr("leret.policies.load.make_policy", lambda settings: policy)
    with loopback(lambda _: Reply("<html>It works!</html>")) as server:
        settings = {"urls": [server.url], "protocol": protocol, "retry_for_s": 60}
        with pytest.raises(RetrievalError, match="sent no JSON"):
            sample(recipe({"kind": "remote", **settings}), Run.create(place / "run"), base_dir=place)
    assert not policy.requests


def test_a_server_that_is_being_started_is_waited_for_when_a_run_opens_it(place: Path) -> None:
    replies = [Reply("starting", 503), Reply({"topk": [{"pid": "1", "text": "T | x", "score": 1.0}]})]
    with loopback(lambda _: replies.pop(0) if len(replies) > 1 else replies[0]) as server:
        load_retriever(RemoteSettings(urls=(server.url,), protocol="colbert", retry_for_s=60), None, place)
        assert len(server.asked) == 2


def samples_of(run: Run) -> list[Sample]:
    with Store(run.store, read_only=True) as store:
        return sorted((s for group in store.groups() for s in group.samples), key=lambda s: s.id)


def test_a_killed_server_is_waited_for_and_changes_nothing(place: Path) -> None:
    assert len(questions(30)) == 30
    undisturbed = Run.create(place / "undisturbed")
    sample(recipe({"stopwords": None}), undisturbed, base_dir=place)
    with ExitStack() as stack:
        url, process = stack.enter_context(served(place / "index"))
        port = int(url.rsplit(":", 1)[1])
        killed = threading.Event()

        def kill() -> None:
            process.kill()
            process.wait()
            killed.set()

        def start_again() -> None:
            assert killed.wait(120)
            time.sleep(1.0)
            stack.enter_context(served(place / "index", port=port))

        starter = threading.Thread(target=start_again)
        starter.start()
        run = Run.create(place / "run")
        report = sample(recipe(remote(url, 200)), run, base_dir=place, progress=OnProgress(5, kill))
        starter.join(120)
    assert killed.is_set()
    assert report.waiting == 0
    assert report.failures == {}
    assert samples_of(run) == samples_of(undisturbed)


def test_a_server_that_stays_away_is_recorded_and_the_same_command_goes_on(place: Path) -> None:
    undisturbed = Run.create(place / "undisturbed")
    sample(recipe({"stopwords": None}), undisturbed, base_dir=place)
    run = Run.create(place / "run")
    with served(place / "index") as (url, process):
        with pytest.raises(RetrievalError) as caught:
            sample(recipe(remote(url, 0.2)), run, base_dir=place, progress=OnProgress(5, process.kill))
        assert caught.value.exit_code == 1
    failed = [s for s in samples_of(run) if s.failure is not None]
    assert all(s.reward is None and s.failure is not None and s.failure.kind == "retrieval" for s in failed)
    with served(place / "index") as (url, _):
        report = sample(recipe(remote(url, 60)), run, base_dir=place)
    assert report.waiting == 0
    assert samples_of(run) == samples_of(undisturbed)
