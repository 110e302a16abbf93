"""ColBERT against MaxSim by hand; its checkpoint is random, so this says nothing about the quality of ColBERTv2."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel

from leret.core.errors import PolicyError, RetrievalError
from leret.extras.colbert import ColbertSettings, MultiVectorModel
from leret.retrieval.load import load_retriever, open_index
from tests.retrieval.small import ANIMALS, colbert_checkpoint, minilm

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

QUERIES = [f"which town by the river has number {i}" for i in range(4)] + ["cat on a mat", "where do birds fly"]
IDS = list(ANIMALS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return colbert_checkpoint(tmp_path_factory.mktemp("colbert") / "checkpoint", tiny=True, dim=32)


def build(checkpoint, index, **more):
    settings = ColbertSettings(**{"index": str(index), "checkpoint": str(checkpoint), **more})
    return load_retriever(settings, ANIMALS, index.parent)


def ids(rankings):
    return [[passage.doc_id for passage in ranking] for ranking in rankings]


def text_of(document):
    title = f"{document.title} | " if document.title else ""
    return f"{title}{document.text}".replace("\ud800", "\ufffd")


def max_sim(checkpoint, query, texts):
    """Return ColBERT's scores, without sentence-transformers: [Q] and [MASK]s, [D] and no punctuation."""
    tokenizer, weights = AutoTokenizer.from_pretrained(checkpoint), load_file(checkpoint / "model.safetensors")
    bert, linear = BertModel.from_pretrained(checkpoint, add_pooling_layer=False), weights.pop("linear.weight")
    bert.load_state_dict({name.removeprefix("bert."): value for name, value in weights.items()}, strict=False)
    skipped = set(tokenizer.convert_tokens_to_ids(list("""!"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~""")))

    def vectors(ids, n_read):
        mask = torch.tensor([[int(i < n_read) for i in range(len(ids))]])
        with torch.inference_mode():
            hidden = bert(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0] @ linear.T
        return torch.nn.functional.normalize(hidden, dim=-1).numpy()

    def marked(text, marker):
        first, *rest = tokenizer(text)["input_ids"]
        return [first, tokenizer.convert_tokens_to_ids(marker), *rest]

    asked, scores = marked(query, "[unused0]"), []
    padded = asked + [tokenizer.mask_token_id] * (32 - len(asked))
    vectors_of_query = vectors(padded, len(asked))
    for text in texts:
        words = marked(text, "[unused1]")
        rows = [i for i, word in enumerate(words) if word not in skipped]
        scores.append((vectors(words, len(words))[rows] @ vectors_of_query.T).max(axis=0).sum())
    return np.array(scores)


@pytest.fixture(scope="module")
def exact(checkpoint):
    return build(checkpoint, checkpoint.parent / "exact", candidates="all")


def test_scores_are_those_of_max_sim(checkpoint, exact):
    for query in QUERIES[:2]:
        scores = max_sim(checkpoint, query, map(text_of, ANIMALS.values()))
        [ranking] = exact.search([query], len(IDS))
        assert [p.score for p in ranking] == pytest.approx(np.sort(scores)[::-1].tolist(), abs=2e-2)  # float16
        assert [scores[IDS.index(p.doc_id)] for p in ranking] == pytest.approx([p.score for p in ranking], abs=2e-2)


def test_a_stopped_build_resumes_after_the_last_batch(checkpoint, exact, tmp_path, monkeypatch):
    def documents(self, texts):
        if len(texts) > 1:  # not the first one, which the encoder is tried on
            counts.append(len(texts))
            if len(counts) == 4:
                raise KeyboardInterrupt
        return real(self, texts)

    counts, real = [], MultiVectorModel.documents
    monkeypatch.setattr(MultiVectorModel, "documents", documents)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "index", batch_size=2, candidates=None)
    [building] = tmp_path.glob(".index.building*")
    for name in ("lengths.bin", "vectors.bin"):  # a batch that was written in part
        with open(next(building.rglob(name)), "ab") as file:
            file.write(b"abc")
    resumed = build(checkpoint, tmp_path / "index", batch_size=2, candidates=None)
    assert counts == [16] * 5  # the last document alone is not counted
    assert ids(resumed.search(QUERIES, 7)) == ids(exact.search(QUERIES, 7))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b'{"model_type": "bert"}', "is not a ColBERT or other"),
        ("config.json", b'{"model_type": "mystery", "architectures": ["HF_ColBERT"]}', "cannot be opened as"),
        ("model.safetensors", b"x" * 100, "cannot be opened as"),
    ],
    ids=["another model", "architecture", "weights"],
)
def test_an_unusable_checkpoint_is_reported(checkpoint, tmp_path, name, content, says):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / name).write_bytes(content)
    with pytest.raises((PolicyError, RetrievalError), match=says):
        build(broken, tmp_path / "index")


def test_no_code_of_a_checkpoint_is_run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to a prompt of transformers
    evil = shutil.copytree(checkpoint, tmp_path / "evil")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    (evil / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["configuration_evil.Evil", None]}}
    (evil / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (evil / "configuration_evil.py").write_text(f"open({str(tmp_path / 'written')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(RetrievalError, match="cannot be opened as"):
        build(evil, tmp_path / "index")
    assert not (tmp_path / "written").exists()


def test_vectors_of_another_corpus_are_refused(checkpoint, exact, tmp_path):
    index = shutil.copytree(checkpoint.parent / "exact", tmp_path / "index")
    manifest = json.loads((index / "manifest.json").read_text())
    (index / "lengths.bin").write_bytes((index / "lengths.bin").read_bytes()[:-4])
    del manifest["files"]["lengths.bin"]
    (index / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RetrievalError, match="do not match the 65 documents"):
        open_index(index)


def test_a_dense_engine_finds_the_candidates(checkpoint, exact, tmp_path):
    dense = {"kind": "dense", "model": str(minilm()), "max_length": 32}
    built = build(checkpoint, tmp_path / "index", candidates=5, engine=dense)
    query = "a pet that says meow"
    [ranking], [whole] = built.search([query], 9), exact.search([query], len(IDS))
    assert (len(ranking), "cat" in ids([ranking])[0]) == (9, True)  # the document has no word of the query
    assert ids([ranking])[0] == [doc_id for doc_id in ids([whole])[0] if doc_id in ids([ranking])[0]]
    reopened = open_index(tmp_path / "index")
    assert (reopened.search([query], 9), reopened.digest) == ([ranking], built.digest)
    with pytest.raises(RetrievalError, match=r"different settings.*engine"):
        build(checkpoint, tmp_path / "index", candidates=5)
