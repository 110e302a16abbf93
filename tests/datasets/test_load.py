"""Splits, limits, the generated world, counting what is skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leret.core.errors import DataError
from leret.datasets.load import load, load_corpus, load_questions
from leret.datasets.splits import split_of
from tests.datasets.writing import DOCUMENTS, json_lines


@pytest.fixture
def questions(tmp_path: Path) -> str:
    return json_lines(
        tmp_path / "q", [{"id": f"q{i}", "question": f"Which {i}?", "relevant_doc_ids": ["A"]} for i in range(200)]
    )


def test_splits_are_disjoint_and_complete(questions: str) -> None:
    parts = {
        split: {q.id for q in load_questions("jsonl", questions, split=split)} for split in ("train", "dev", "test")
    }
    assert sum(map(len, parts.values())) == 200 == len(set.union(*parts.values()))
    assert all(split_of(id) == split for split, ids in parts.items() for id in ids)
    assert len(load_questions("jsonl", questions, split="all")) == 200


def test_a_larger_limit_only_adds(questions: str) -> None:
    few, more = (load_questions("jsonl", questions, split="train", limit=n).items for n in (10, 40))
    assert more[:10] == few
    assert [q.id for q in few] != [q.id for q in load_questions("jsonl", questions, split="train").items[:10]]


def test_a_limit_does_not_depend_on_the_order_of_the_file(questions: str, tmp_path: Path) -> None:
    turned = tmp_path / "turned"
    turned.write_text("".join(reversed(Path(questions).read_text().splitlines(keepends=True))))
    assert load_questions("jsonl", questions, limit=20).items == load_questions("jsonl", str(turned), limit=20).items


def test_another_seed_chooses_other_questions(questions: str) -> None:
    one, two = ({q.id for q in load_questions("jsonl", questions, limit=20, seed=seed)} for seed in (0, 1))
    assert one != two


def test_a_split_in_the_file_wins_over_the_hash(tmp_path: Path) -> None:
    names = ("train", "validation", "test")
    records = [{"id": f"q{i}", "question": "?!", "relevant_doc_ids": ["A"], "split": names[i % 3]} for i in range(9)]
    path = json_lines(tmp_path / "q", records)
    assert [q.id for q in load_questions("jsonl", path, split="dev")] == ["q1", "q4", "q7"]


def test_skipped_records_are_counted_by_kind_and_the_rest_is_read(tmp_path: Path) -> None:
    good = '{"id": "q1", "question": "Who?", "relevant_doc_ids": ["A"]}'
    (tmp_path / "q").write_text(
        f'{good}\nnonsense\n{{"id": "q2"}}\n{good}\n{{"id": "q3", "question": "Who?", "relevant_doc_ids": ["Z"]}}\n'
    )
    data = load(
        "jsonl", str(tmp_path / "q"), json_lines(tmp_path / "c", [*DOCUMENTS, {"doc_id": "D"}]), skip_invalid=True
    )
    assert [q.id for q in data.questions] == ["q1"]
    assert data.questions.skipped == {"broken JSON": 1, "missing field": 1, "duplicate id": 1, "unknown gold": 1}
    assert data.questions.n_skipped == 4
    assert data.problems.kinds == {"missing field": 1}


def test_all_faults_come_in_one_error_up_to_twenty(tmp_path: Path) -> None:
    good = json.dumps({"id": "a", "question": "Why?", "relevant_doc_ids": ["d"]})
    (tmp_path / "q").write_text("nonsense\n" * 25 + good)
    with pytest.raises(DataError) as caught:
        load_questions("jsonl", str(tmp_path / "q"))
    text = str(caught.value)
    assert "25 bad records" in text
    assert f"{tmp_path / 'q'}:20: broken JSON" in text
    assert ":21:" not in text
    assert "and 5 more" in text
    assert "--skip-invalid" in text
    (tmp_path / "q").write_text("nonsense\n" * 25)
    with pytest.raises(DataError) as caught:
        load_questions("jsonl", str(tmp_path / "q"))
    assert "--skip-invalid" not in str(caught.value)  # nothing would be left


def test_the_generated_world_brings_its_splits() -> None:
    data = load("world", split="dev", seed=1, options={"n_train": 30, "n_dev": 10, "n_test": 20})
    assert len(data.questions) == 10
    assert all(doc_id in data.corpus for question in data.questions for doc_id in question.gold)
    assert load_corpus("world", seed=1, options={"n_train": 30, "n_dev": 10, "n_test": 20}).digest == data.corpus.digest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_trian": 3}, "no option 'n_trian'; it has n_train"),
        ({"n_train": "many"}, "n_train is 'many'"),
        ({"n_dev": True}, "a number"),
    ],
)
def test_unknown_options_of_the_world_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load("world", options=options)
