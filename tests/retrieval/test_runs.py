import pytest

from leret.config.retriever import BM25Settings, RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.extras import pubmed
from leret.retrieval.load import open_retriever
from leret.sampling.stage import sample
from tests.datasets.writing import json_lines
from tests.extras.ncbi import article, efetch, esearch
from tests.retrieval.serving import Reply, loopback, running
from tests.sampling.fakes import WORDS, FakePolicy, content, policy_is, recipe_of, write_data


@pytest.fixture
def place(tmp_path):
    write_data(tmp_path)
    with policy_is(FakePolicy(delay_s=0.01)):  # time for something to go wrong
        yield tmp_path


def sampled(retriever, run, progress=None, **data):
    recipe = recipe_of(prompts=1, samples=4, concurrency=4, data=data).model_copy(update={"retriever": retriever})
    return sample(recipe, Run.create(run), base_dir=run.parent, progress=progress)


def remote(url, retry_for_s):
    return RemoteSettings(k=2, urls=(url,), retry_for_s=retry_for_s, timeout_s=10, cache={"use": "off"})


def samples_of(run):
    return sorted((s for group in content(Run(run)) for s in group.samples), key=lambda s: s.id)


class OnProgress(Progress):
    def __init__(self, n, call):
        self.left, self.call = n, call

    def advance(self, n=1, **facts):
        self.left -= n
        if self.left <= 0:
            self.call()


def test_a_wrong_url_stops_a_run_before_its_first_lm_call(place):
    policy = FakePolicy()
    with policy_is(policy), loopback(Reply("<html>It works!</html>")) as server:
        settings = RemoteSettings(urls=(server.url,), retry_for_s=60)
        with pytest.raises(RetrievalError, match="sent invalid JSON"):
            sampled(settings, place / "run")
    assert not policy.requests


def test_a_run_resumes_after_a_retrieval_outage(place):
    index = str(place / "index")
    sampled(BM25Settings(k=2, stopwords=None, index=index), place / "undisturbed")
    with running(open_retriever(index)) as server, pytest.raises(RetrievalError) as caught:
        sampled(remote(server.url, 0.2), place / "run", OnProgress(5, server.stop))
    assert caught.value.exit_code == 1
    failed = [s for s in samples_of(place / "run") if s.failure is not None]
    assert all(s.reward is None and s.failure.kind == "retrieval" for s in failed)
    with running(open_retriever(index)) as server:
        assert sampled(remote(server.url, 60), place / "run").waiting == 0
    assert samples_of(place / "run") == samples_of(place / "undisturbed")


def site(asked):
    if "esearch" in asked.path:
        words = dict.fromkeys(asked.params["term"].split())
        return esearch([str(WORDS.index(word) + 1) for word in words if word in WORDS][: int(asked.params["retmax"])])
    return efetch(article(i, f"about {WORDS[int(i) - 1]}") for i in asked.params["id"].split(","))


def test_a_pubmed_run_replays_from_the_cache(place, monkeypatch):
    asked = enumerate(WORDS)
    rows = [{"id": f"q{i}", "question": f"articles on {w}", "relevant_doc_ids": [str(i + 1)]} for i, w in asked]
    json_lines(place / "questions.jsonl", rows)
    monkeypatch.setattr(pubmed, "shared_rate", lambda *_: None)
    with loopback(site) as server:
        settings = pubmed.PubMedSettings(k=2, url=server.url, retry_for_s=5)
        online = sampled(settings, place / "online", corpus=None)
    assert online.failures == {}
    assert online.samples > len(WORDS)
    offline = sampled(settings.model_copy(update={"offline": True}), place / "offline", corpus=None)
    assert samples_of(place / "offline") == samples_of(place / "online")
    assert offline.mean_reward == online.mean_reward > 0
