"""Compare `kind: colbert` with colbert-ai: exact scores on 3,000 documents, and queries per second with PLAID.

    python benchmarks/cost/late_interaction.py --python PYTHON [--work DIR] [--documents N] [--queries N] [OPTIONS]

PYTHON runs colbert-ai 0.2.22 (`pip install "colbert-ai[faiss-cpu]==0.2.22" transformers==4.57.6`, a C++ compiler and
ninja); it does not need leret. The checkpoint has the weights of MiniLM's first `--layers` layers and an untrained
projection to `--dim` dimensions. Both encode the first 3,000 documents for the comparison of scores. PLAID's index (2
bits) is built from leret's token vectors, so build times are not comparable. Each process has one thread. Files that an
earlier call left in `--work` are reused. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EXACT = 3_000  # documents in the comparison of scores


def theirs(folder: Path, part: str) -> dict[str, Any]:
    """Run a part in colbert-ai's environment: exact scores of all documents, or PLAID's speed by k."""
    import torch

    torch.set_num_threads(1)
    inputs = json.loads((folder / "inputs.json").read_text())
    checkpoint, queries, texts = inputs["checkpoint"], inputs["queries"], inputs["texts"]
    if part == "exact":
        from colbert.infra import ColBERTConfig
        from colbert.modeling.checkpoint import Checkpoint
        from colbert.modeling.colbert import ColBERT, colbert_score

        ColBERT.loaded_extensions = True  # `colbert_score` needs no compiler
        model = Checkpoint(checkpoint, ColBERTConfig.load_from_checkpoint(checkpoint), verbose=0)
        asked = model.queryFromText(queries, bsize=64)
        scores = []
        for start in range(0, EXACT, 250):
            tokens = model.doc_tokenizer.tensorize(texts[start : start + 250])
            documents, masks = model.doc(*tokens, keep_dims="return_mask")
            scores.append(np.stack([colbert_score(q[None], documents, masks).numpy() for q in asked]))
        np.save(folder / "exact.npy", np.concatenate(scores, axis=1))
        return {}
    return _plaid(folder, checkpoint, queries, texts)


def _plaid(folder: Path, checkpoint: str, queries: list[str], texts: list[str]) -> dict[str, Any]:
    import torch
    from colbert import Indexer, Searcher
    from colbert.indexing.collection_encoder import CollectionEncoder
    from colbert.infra import ColBERTConfig, Run, RunConfig

    lengths = np.fromfile(folder / "index" / "lengths.bin", np.int32)
    vectors = np.memmap(folder / "index" / "vectors.bin", np.float16, "r").reshape(lengths.sum(), -1)
    starts, rows = np.concatenate([[0], np.cumsum(lengths)]), {text: row for row, text in enumerate(texts)}

    def encode_passages(self: Any, passages: list[str]) -> Any:
        found = [rows[text] for text in passages]
        tokens = np.concatenate([vectors[starts[row] : starts[row + 1]] for row in found])
        return torch.from_numpy(tokens.astype(np.float32)), lengths[found].tolist()

    CollectionEncoder.encode_passages = encode_passages
    figures: dict[str, Any] = {}
    with Run().context(RunConfig(nranks=1, root=str(folder), experiment="plaid", avoid_fork_if_possible=True)):
        if not (folder / "plaid" / "indexes" / "plaid" / "metadata.json").exists():
            start = time.perf_counter()
            indexer = Indexer(checkpoint, ColBERTConfig(nbits=2, kmeans_niters=1), verbose=0)
            indexer.index("plaid", texts, overwrite="force_silent_overwrite")
            figures["plaid_build_s"] = time.perf_counter() - start
        for k in (10, 100):
            searcher = Searcher("plaid", collection=texts, verbose=0)
            for _ in range(2):  # the first pass reads the files
                start = time.process_time()
                for query in queries:
                    searcher.search(query, k)
            figures[f"plaid_queries_per_cpu_s_at_{k}"] = len(queries) / (time.process_time() - start)
    return figures


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build leret's index, ask for colbert-ai's figures, and return the comparison."""
    from benchmarks.cost.retrieval import _data, more_documents
    from leret.datasets.corpus import Corpus
    from leret.extras.colbert import ColbertSettings
    from leret.retrieval.load import load_retriever

    folder, data = arguments.work, _data(arguments.data)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = _checkpoint(folder / "checkpoint", arguments.layers, arguments.dim)
    queries = [task.text for task in data.tasks][: arguments.queries]
    documents = list(more_documents(data.corpus, arguments.documents))
    texts = [f"{one.title} | {one.text}" for one in documents]
    (folder / "inputs.json").write_text(json.dumps({"checkpoint": str(checkpoint), "queries": queries, "texts": texts}))
    settings = {"checkpoint": str(checkpoint), "k": 10}
    small = ColbertSettings(candidates=None, index=str(folder / "small"), **settings)
    figures = _scores(arguments, load_retriever(small, Corpus(documents[:EXACT]), folder), queries)
    engine = load_retriever(ColbertSettings(index=str(folder / "index"), **settings), Corpus(documents), folder)
    for k in (10, 100):
        engine.search(queries, k)  # reads the files
        for name, work in (
            ("", lambda k=k: [engine.search([query], k) for query in queries]),
            ("_batched", lambda k=k: engine.search(queries, k)),
        ):
            start = time.process_time()
            work()
            figures[f"queries_per_cpu_s_at_{k}{name}"] = len(queries) / (time.process_time() - start)
    return figures | _run(arguments, "plaid")


def _scores(arguments: argparse.Namespace, exact: Any, queries: list[str]) -> dict[str, Any]:
    _run(arguments, "exact")
    expected = np.load(arguments.work / "exact.npy")
    rows = {passage.doc_id: row for row, passage in enumerate(exact._documents.passages(range(EXACT), [0.0] * EXACT))}
    differences, same = [], 0
    for query, scores in zip(queries, expected, strict=True):
        [ranking] = exact.search([query], EXACT)
        order = [rows[passage.doc_id] for passage in ranking]
        differences.append(np.abs(np.array([passage.score for passage in ranking]) - scores[order]).max())
        same += len({*order[:10]} & {*np.argsort(-scores, kind="stable")[:10].tolist()})
    return {
        "largest_score": float(expected.max()),
        "largest_difference_of_scores": float(max(differences)),
        "overlap_at_10": same / (10 * len(queries)),
    }


def _checkpoint(directory: Path, layers: int, dim: int) -> Path:
    from safetensors.torch import load_file, save_file

    from tests.retrieval.small import colbert_checkpoint

    if directory.exists():
        return directory
    colbert_checkpoint(directory, dim=dim)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    metadata = json.loads((directory / "artifact.metadata").read_text()) | {"checkpoint": None, "model_name": None}
    (directory / "artifact.metadata").write_text(json.dumps(metadata))  # colbert-ai would look for both on the hub
    weights = load_file(directory / "model.safetensors")
    others = tuple(f"bert.encoder.layer.{number}." for number in range(layers, 99))
    few = {name: value for name, value in weights.items() if not name.startswith(others)}
    save_file(few, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _run(arguments: argparse.Namespace, part: str) -> dict[str, Any]:
    if part == "exact" and (arguments.work / "exact.npy").exists():
        return {}
    command = [arguments.python, __file__, "--work", str(arguments.work), "--part", part]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables).stdout
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures as a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data" / "hotpotqa")
    parser.add_argument("--python", default=sys.executable, help="Python with colbert-ai")
    parser.add_argument("--work", type=Path, default=Path("colbert-work"), help="directory for indexes")
    parser.add_argument("--documents", type=int, default=29_082)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--part", choices=["exact", "plaid"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    if arguments.part:
        figures = theirs(arguments.work, arguments.part)
    else:
        sys.path.append(str(ROOT))
        figures = ours(arguments)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
