"""`leret data inspect`: counts, bad records with their places, the same words as from other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_app import leret
from tests.datasets.writing import json_lines
from tests.first_steps import write_world

FILES = ["--questions", "questions.jsonl", "--corpus", "corpus.jsonl"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with data of a user's own and nothing else."""
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"qid": "a", "query": "?", "gold": ["A"]}\n', "neither 'relevant_doc_ids' nor"),
     ("id,question\n1,Who?\n", "broken JSON"),
     ('{"what": 1}\n', "field 'question' or 'query' is missing; the fields are 'what'"),
     ('{"id": "a", "question": "Who?", "relevant_doc_ids": ["Z"]}\n', "gold document 'Z' of question 'a' is not in")],
)  # fmt: skip
def test_bad_files_get_the_words_of_sample_from_every_command(folder: Path, text: str, says: str) -> None:
    (folder / "questions.jsonl").write_text(text)
    data = ["data.questions=questions.jsonl", "data.corpus=corpus.jsonl", "data.kind=jsonl", "data.split=all"]
    sets = [part for value in data for part in ("--set", value)]
    for command in (["init", *FILES], ["data", "inspect", *FILES], ["sample", "demo", "--run", "r", *sets, "--dry-run"],
                    ["sample", "demo", "--run", "r", *sets]):  # fmt: skip
        code, out = leret(*command)
        assert (code, says in out) == (2, True), (command, out)


def test_inspect_tells_one_bad_record_among_good_ones(folder: Path) -> None:
    with (folder / "questions.jsonl").open("a") as file:
        file.write('{"id": "a", "question": "Who?", "relevant_doc_ids": ["Z"]}\n')
    code, out = leret("data", "inspect", *FILES)
    assert (code, "unknown gold 1" in out, "jsonl:101: gold document 'Z'" in out) == (2, True, True), out
    code, out = leret("data", "inspect", *FILES, "--skip-invalid", "--json")
    assert (code, json.loads(out)["n_questions"]) == (0, 100)
    code, out = leret("data", "inspect", "questions.jsonl")
    assert (code, "--questions" in out) == (2, True)


def test_inspect_shows_many_gold_documents_in_short(folder: Path) -> None:
    documents = [{"doc_id": f"d{i}", "title": "", "text": "x"} for i in range(40)]
    asked = [{"id": f"q{n}", "question": f"{n}?", "relevant_doc_ids": [d["doc_id"] for d in documents[:n]]}
             for n in range(1, 41)]  # fmt: skip
    json_lines(folder / "questions.jsonl", asked[::-1])
    json_lines(folder / "corpus.jsonl", documents)
    code, out = leret("data", "inspect", *FILES)
    assert code == 0, out
    assert re.search(r"gold documents a question +1 1, 2 1, 3 1, 4 1, 5-8 4, 9-16 8, 17-32 16, 33-64 8\n", out)
    assert "q40: 40? (d0, d1, d2, d3, d4 and 35 more)" in out
    assert "None" not in out
