"""`leret sample` over PubMed: without a corpus, and again without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.retrieval.clients import pubmed
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.retrieval.clients.ncbi import esearch
from tests.retrieval.serving import Asked, Reply, loopback
from tests.sampling.fakes import WORDS, FakePolicy

ROOT = Path(__file__).resolve().parents[3]


def answer(asked: Asked) -> Reply:
    """Each word of a query finds the article of its number; records have no abstract."""
    if "esearch" in asked.path:
        words = dict.fromkeys(asked.params["term"].split())
        return esearch([str(WORDS.index(word) + 1) for word in words if word in WORDS][: int(asked.params["retmax"])])
    records = "".join(
        f"<PubmedArticle><MedlineCitation><PMID>{i}</PMID><Article><ArticleTitle>about {WORDS[int(i) - 1]}"
        "</ArticleTitle></Article></MedlineCitation></PubmedArticle>"
        for i in asked.params["id"].split(",")
    )
    return Reply(f"<PubmedArticleSet>{records}</PubmedArticleSet>")


def recipe(url: str, offline: bool) -> SamplingRecipe:
    return SamplingRecipe.model_validate(
        {
            "data": {"kind": "jsonl", "questions": "questions.jsonl", "split": "all"},
            "retriever": {"kind": "pubmed", "k": 2, "url": url, "offline": offline, "retry_for_s": 5},
            "policy": {"model": "fake", "max_tokens": 8},
            "program": {"path": f"{ROOT}/pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
            "sampling": {"prompts": 1, "samples": 3, "seed": 1},
        }
    )


def samples_of(run: Run) -> list[Any]:
    with Store(run.store, read_only=True) as store:
        return sorted((s for group in store.groups() for s in group.samples), key=lambda s: s.id)


def test_a_run_needs_no_corpus_and_replays_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": f"q{i}", "question": f"articles on {w}", "relevant_doc_ids": [str(i + 1)]} for i, w in enumerate(WORDS)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("LERET_CACHE_DIR", str(tmp_path / "answers"))
    monkeypatch.setattr("leret.policies.load.make_policy", lambda settings: FakePolicy())
    monkeypatch.setattr(pubmed, "shared_rate", lambda *_: None)
    online, offline = Run.create(tmp_path / "online"), Run.create(tmp_path / "offline")
    with loopback(answer) as server:
        report = sample(recipe(server.url, False), online, base_dir=tmp_path)
    assert report.failures == {}
    assert report.samples > len(WORDS)
    again = sample(recipe(server.url, True), offline, base_dir=tmp_path)
    assert samples_of(offline) == samples_of(online)
    assert again.mean_reward == report.mean_reward > 0


@pytest.mark.parametrize(
    ("retriever", "says"),
    [
        ("{kind: remote}", "retriever.urls: missing"),
        ("{kind: bm25, urls: [http://h]}", "retriever.urls: not of this kind, but of remote"),
        ("{kind: remote, urls: []}", "urls"),
        ("{kind: remote, urls: [http://h], protocol: soap}", "soap"),
        ("{kind: pubmed, max_date: soon}", "is no date"),
        ("{kind: pubmed, emial: x}", "did you mean retriever.email"),
        ("{kind: rm3, original_weight: 2}", "at most 1"),
        ("{kind: hybrid, engines: [{kind: bm25, k: 9}, {kind: bm25}]}", "k is of the whole retriever"),
        ("{kind: colbert, index_root: x}", "index_root and index_name go together"),
        ("{kind: dense}", "retriever.model: missing"),
    ],
)
def test_mistakes_in_a_recipe_are_told_with_their_place(tmp_path: Path, retriever: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"data: {{kind: world}}\nretriever: {retriever}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), SamplingRecipe, (), optional=("policy.model",))
    assert says in str(caught.value)
    assert "recipe.yaml" in str(caught.value)
