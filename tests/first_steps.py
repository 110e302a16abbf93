"""Commands in this process, and a reader's data for what README and docs run on them."""

import json
import shutil
from functools import cache
from pathlib import Path

from typer import testing

from leret.cli.app import app
from leret.datasets.world.generate import generate
from tests.datasets.writing import json_lines
from tests.sampling.fakes import ROOT

testing._get_command = cache(testing._get_command)  # Typer makes all commands again for each call


def leret(*words):
    result = testing.CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def succeeds(*words):
    code, out = leret(*words)
    assert code == 0, (words, out)
    return out


def refused(*words, code=2):
    status, out = leret(*words)
    assert (status, out.count("error: "), "Traceback" in out) == (code, 1, False), out
    return out


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def edit(path, old, new):
    text = Path(path).read_text(encoding="utf-8")
    assert old in text, (path, old)
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


SMALLER = {
    "sampling/demo.yaml": {
        "split: train": "split: train\n  limit: 16\n  options: {n_train: 24, n_dev: 6, n_test: 8}",
        "prompts: 4": "prompts: 1",
    },
    "training/demo-grpo.yaml": {"max_steps: 150": "max_steps: 2"},
    "eval/demo.yaml": {"limit: null": "limit: 5", "resamples: 10000": "resamples: 100"},
}


def copy_recipes(folder):
    """Copy recipes and programs of the checkout, those of the demo with small values."""
    for name in ("sampling", "training", "eval", "pipelines"):
        shutil.copytree(ROOT / name, folder / name)
    for name, changes in SMALLER.items():
        for old, new in changes.items():
            edit(folder / name, old, new)


def write_world(folder, n_train=70, n_dev=10, n_test=20, comparison=0.25):
    """Write questions.jsonl and corpus.jsonl in leret's JSON lines, without splits; return the documents."""
    documents, questions = generate(1, n_train, n_dev, n_test, comparison)
    corpus = [{"doc_id": d.doc_id, "title": d.title, "text": d.text} for d in documents]
    asked = [{"id": q.id, "question": q.text, "answer": q.answers[0], "relevant_doc_ids": q.gold} for q in questions]
    json_lines(folder / "corpus.jsonl", corpus)
    json_lines(folder / "questions.jsonl", asked)
    return documents
