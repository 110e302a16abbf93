"""Rows by hand, losses in float64, and tiny random models that learn them; nothing here says how well MiniLM learns."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from leret.config.load import sampling_recipe_of
from leret.config.retriever import RetrieverSettings
from leret.core.errors import RetrievalError, RunError, TrainingError
from leret.core.types import Sample, State, digest
from leret.extras.retriever_kl import (
    RetrieverKLRecipe,
    examples,
    make_trainer,
    retriever_rows,
)
from leret.retrieval.load import build_index, load_retriever
from leret.rollouts.environment import Environment
from leret.sampling.store.store import PathStep, SamplingParams, Store
from leret.training.stage import train
from tests.datasets.writing import json_lines
from tests.first_steps import succeeds
from tests.retrieval.small import colbert_checkpoint
from tests.sampling.fakes import unsampled_run
from tests.training.training_runs import POLICY, Stopper, interrupt, job_in, record, train_ids

DOCS = {"cat": "the cat sat on the mat", "dog": "a dog barks at night", "sun": "the sun is a star", "sea": "salt water"}
SMALL = {"learning_rate": 2e-3, "num_documents": 3, "per_device_train_batch_size": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    colbert_checkpoint(folder / "colbert", tiny=True, dim=16)
    backbone = Transformer(str(folder / "colbert"), max_seq_length=32)
    SentenceTransformer(modules=[backbone, Pooling(32)], device="cpu").save(str(folder / "dense"))
    return folder


def found(id, index, doc_ids, reward):
    return Sample(digest(id, index), "", id, 0, "0", index, index, str(index), doc_ids=doc_ids, reward=reward,
                  scores=tuple(1.0 for _ in doc_ids))  # fmt: skip


def sampled(path, retriever, samples=(("cat",), ("dog",), ("sun",)), n=8):
    """Write a run of ``n`` questions; each has one state, and each sample found documents. The first earned 1."""
    documents = [{"doc_id": id, "title": id.title(), "text": text} for id, text in DOCS.items()]
    rows = ({"id": id, "question": f"what purrs {i}", "relevant_doc_ids": ["cat"]} for i, id in enumerate(train_ids(n)))
    questions, corpus = json_lines(path.parent / "q.jsonl", rows), json_lines(path.parent / "c.jsonl", documents)
    run = unsampled_run(path, {
        "data": {"kind": "jsonl", "questions": questions, "corpus": corpus}, "policy": {"kind": "features"},
        "program": {"path": "pipelines/picks.py:SearchPicks"}, "retriever": retriever, "sampling": {"prompts": 1},
    })  # fmt: skip
    run.update(digests={"policy": POLICY})
    with Store(run.store) as store:
        for id in train_ids(n):
            state = State(digest(id, "s"), id, 0, "pick", {"question": id}, ({"role": "user", "content": id},))
            store.put_state(state)
            for i, doc_ids in enumerate(samples):
                row = replace(found(id, i, doc_ids, float(i == 0)), state_id=state.id)
                store.put_samples([row], SamplingParams("base", POLICY, "p", 1.0, 1.0, 16))
            store.put_visit(PathStep(id, 0, POLICY, state.id, None, None, "solved"))
    return run


def corpus_of(run):
    with Environment.open(run) as environment:
        return environment.corpus


def test_rows_hold_questions_and_documents_of_states_with_spread(models, tmp_path):
    dense = {"kind": "dense", "model": str(models / "dense"), "query_prefix": "query: ", "separator": " / "}
    run = sampled(tmp_path / "run", dense)
    with Environment.open(run) as environment:
        [row, *others] = retriever_rows(run, environment)
        assert (row["query"], row["doc_ids"], row["scores"]) == ("what purrs 0", ["cat", "dog", "sun"], [1.0, 0.0, 0.0])
        assert row["documents"][0] == "Cat. the cat sat on the mat"
        assert len(others) == 7
        [row, *_] = retriever_rows(run, environment, settings=RetrieverSettings.model_validate(dense))
        assert (row["query"], row["documents"][0]) == ("query: what purrs 0", "Cat / the cat sat on the mat")
    succeeds("store", "export", "--run", run.path, "--form", "retriever", "--out", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [(row["predictor"], row["doc_ids"][0], row["scores"][0]) for row in rows] == [("pick", "cat", 1.0)] * 8
    even = sampled(tmp_path / "even", dense, samples=(("cat",), ("cat",)))
    with Environment.open(even) as environment:
        assert not list(retriever_rows(even, environment))
    with pytest.raises(TrainingError, match="0 states have documents with different rewards"):
        train(RetrieverKLRecipe(**SMALL), even)
    lost = sampled(tmp_path / "lost", dense, samples=(("cat",), ("gone",)))
    with Environment.open(lost) as environment, pytest.raises(RunError, match=r"document 'gone'.*data.corpus"):
        list(retriever_rows(lost, environment))


def test_rows_are_cut_or_filled_to_the_number_of_documents():
    def row(name, texts, scores):
        return {"question_id": name, "query": name, "doc_ids": texts, "documents": texts, "scores": scores}

    texts = [f"text {i}" for i in range(6)]
    rows = [row("a", texts, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), row("b", ["x", "y"], [1.0, 0.5])]
    first, second = examples(RetrieverKLRecipe(num_documents=4), rows)
    assert first.completions[:2] == ("text 0", "text 1")
    assert set(first.completions[2:]) < set(texts[2:])
    assert (second.completions[:2], second.scores) == (("x", "y"), (1.0, 0.5, 0.5, 0.5))
    assert set(second.completions[2:]) <= set(texts)


@pytest.mark.parametrize(("kind", "key", "temperature"), [("dense", "model", 0.05), ("colbert", "checkpoint", 1.0)])
def test_loss_is_the_kl_of_softmax_scores_from_softmax_rewards(models, tmp_path, kind, key, temperature):
    run = sampled(tmp_path / "run", {"kind": kind, key: str(models / kind)})
    job = job_in(RetrieverKLRecipe(**SMALL, reward_temperature=0.5), run)
    trainer = make_trainer(job, "cpu")
    trainer.model.eval()
    rows = [trainer.train_dataset[i] for i in range(3)]
    batch = trainer.data_collator(rows)
    loss = float(trainer.compute_loss(trainer.model, batch).detach())
    expected = []
    for row in rows:
        texts = [row[f"document_{i}"] for i in range(3)]
        query, documents = trainer.model.encode_query([row["query"]]), trainer.model.encode_document(texts)
        if kind == "dense":
            scores = [one @ query[0] / np.linalg.norm(one) / np.linalg.norm(query[0]) for one in documents]
        else:
            scores = [float((one @ query[0].T).max(axis=0).values.sum()) for one in map(torch.as_tensor, documents)]
        ours = torch.log_softmax(torch.tensor(np.array(scores), dtype=torch.float64) / temperature, -1)
        theirs = torch.log_softmax(torch.tensor(row["label"], dtype=torch.float64) / 0.5, -1)
        expected.append(float((theirs.exp() * (theirs - ours)).sum()) * temperature**2)
    assert loss == pytest.approx(np.mean(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "key", "library"), [("dense", "model", SentenceTransformer), ("colbert", "checkpoint", MultiVectorEncoder)]
)
def test_a_trained_retriever_prefers_what_earned_rewards_and_has_an_index_of_its_own(
    models, tmp_path, kind, key, library
):
    run = sampled(tmp_path / "run", {"kind": kind, key: str(models / kind)})
    report = train(RetrieverKLRecipe(**SMALL, num_train_epochs=15, max_length=16), run)
    assert report.path == run.path / "retrievers" / "retriever-kl"
    assert report.loss_last < report.loss_first / 2
    assert "retriever" in (report.path / "README.md").read_text()
    assert isinstance(library(str(report.path)), library)
    settings = sampling_recipe_of(run).retriever
    build_index(settings, corpus_of(run), tmp_path / "index")
    trained = settings.model_copy(update={key: str(report.path), "index": str(tmp_path / "index")})
    with pytest.raises(RetrievalError, match=f"different settings.*{key}"):
        load_retriever(trained, corpus_of(run), tmp_path)
    more = {} if kind == "dense" else {"candidates": None}
    other = trained.model_copy(update={"index": str(tmp_path / "new"), **more})
    engine = load_retriever(other, corpus_of(run), tmp_path)
    assert engine.search(["what purrs 3"], 1)[0][0].doc_id == "cat"
    assert train(RetrieverKLRecipe(**SMALL, num_train_epochs=15, max_length=16), run).already


def test_an_interrupted_training_resumes_to_the_same_weights(models, tmp_path):
    run = sampled(tmp_path / "run", {"kind": "dense", "model": str(models / "dense")})
    keys = {**SMALL, "num_train_epochs": 2, "save_steps": 2}
    whole = train(RetrieverKLRecipe(**keys, name="whole"), run)
    with pytest.raises(KeyboardInterrupt):
        train(RetrieverKLRecipe(**keys, name="parts"), run, progress=Stopper(2, interrupt))
    parts = train(RetrieverKLRecipe(**keys, name="parts"), run)
    assert 0 < parts.resumed_from < parts.steps
    assert record(parts)["weights"] == record(whole)["weights"]


def test_the_model_is_the_runs_or_that_of_init_from(models, tmp_path):
    run = sampled(tmp_path / "run", {"kind": "bm25"})
    with pytest.raises(TrainingError, match="init_from"):
        train(RetrieverKLRecipe(**SMALL), run)
    two = {"kind": "dense", "model": str(models / "dense"), "query_model": str(models / "dense")}
    with pytest.raises(TrainingError, match="query_model"):
        train(RetrieverKLRecipe(**SMALL), sampled(tmp_path / "two", two))
    first = train(RetrieverKLRecipe(**SMALL, name="first", init_from=str(models / "dense")), run)
    second = train(RetrieverKLRecipe(**SMALL, name="second", init_from="first"), run)
    assert record(second)["total_steps"] == 2 * record(first)["total_steps"]
    with pytest.raises(ValueError, match="eval_steps"):
        RetrieverKLRecipe(eval_steps=5)
