"""Every kind of bad data ends with one message: place, fault, mend."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from leret.core.errors import DataError
from leret.datasets.load import load, load_questions
from leret.datasets.records import chunks
from tests.datasets.writing import DOCUMENTS, HOTPOT, HOVER, MUSIQUE, QUESTIONS, array, json_lines

_GOOD = b'{"id": "q1", "question": "Who?", "relevant_doc_ids": ["A"]}\n'
_MANY = b"".join(
    b'{"id": "q%d", "question": "Who was the %dth?", "relevant_doc_ids": ["A"]}\n' % (i, i * i) for i in range(2000)
)


def _line(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(_GOOD + text.encode() + b"\n") and None


def _bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


QUESTION_FILES = [
    pytest.param(
        _line('{"id": "q2", "question": "Wh'), r":2: broken JSON \(Unterminated string .* column", id="broken-json"
    ),
    pytest.param(_line("[1, 2]"), ":2: list where a JSON object should be", id="not-an-object"),
    pytest.param(_line("[" * 100_000), ":2: JSON that cannot be read", id="nested-too-deep"),
    pytest.param(
        _line('{"id": "q2", "relevant_doc_ids": ["A"]}'),
        ":2: field 'question' or 'query' is missing; the fields are 'id'",
        id="missing-question",
    ),
    pytest.param(_line('{"id": "q2", "question": "?!"}'), ":2: field 'relevant_doc_ids' is missing", id="missing-gold"),
    pytest.param(
        _line('{"id": 7, "question": "Who?", "relevant_doc_ids": ["A"]}'),
        r":2: field 'id' is '7' \(int\); it should be a string",
        id="id-is-a-number",
    ),
    pytest.param(
        _line('{"id": "q2", "question": ["Who?"], "relevant_doc_ids": ["A"]}'),
        r":2: field 'question' is .*\(list\)",
        id="question-is-a-list",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": "A"}'),
        "it should be a list of strings",
        id="gold-is-a-string",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": ["A", 3]}'),
        "not empty, item by item",
        id="gold-holds-a-number",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": []}'),
        ":2: field 'relevant_doc_ids' is empty",
        id="no-gold",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "  ", "relevant_doc_ids": ["A"]}'),
        ":2: field 'question' is empty",
        id="empty-question",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": ["A"], "hops": "2"}'),
        "a whole number",
        id="hops-is-a-string",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": ["A"], "split": "eval"}'),
        "'eval'; it should be train, dev or test",
        id="unknown-split",
    ),
    pytest.param(
        _line('{"id": "q1", "question": "Who?", "relevant_doc_ids": ["A"]}'),
        ":2: id 'q1' was there before, at number 1",
        id="duplicate-id",
    ),
    pytest.param(
        _line('{"id": "q2", "question": "Who?", "relevant_doc_ids": ["Z"]}'),
        ":2: gold document 'Z' of question 'q2' is not in the corpus",
        id="unknown-gold",
    ),
    pytest.param(_bytes(_GOOD + b'{"id": "\xff"}\n'), ":2: not UTF-8 at byte 8", id="not-utf8"),
    pytest.param(_bytes(_GOOD.decode().encode("utf-16")), "is UTF-16; save it as UTF-8", id="utf16"),
    pytest.param(_bytes(b""), "is empty; give a file", id="empty-file"),
    pytest.param(_bytes(b"\n\n"), "is blank; give a file", id="blank-file"),
    pytest.param(_bytes(gzip.compress(b"")), "is empty; give a file", id="empty-gzip"),
    pytest.param(
        _bytes(gzip.compress(_MANY)[:-400]), "the compressed file ends early; get it again", id="truncated-gzip"
    ),
    pytest.param(
        _bytes(gzip.compress(_MANY)[:300] + b"x" * 99 + gzip.compress(_MANY)[399:]),
        "compressed file is broken",
        id="broken-gzip",
    ),
    pytest.param(
        _bytes(zstandard.ZstdCompressor().compress(_MANY)[:-9]), "the compressed file ends early", id="truncated-zstd"
    ),
    pytest.param(_bytes(b"\x28\xb5\x2f\xfd" + b"nonsense" * 9), "compressed file is broken", id="broken-zstd"),
    pytest.param(lambda path: path.mkdir(), "is a directory; name a file in it", id="directory"),
    pytest.param(lambda path: None, "no such file; check the path", id="no-such-file"),
]


@pytest.mark.parametrize(("make", "match"), QUESTION_FILES)
def test_a_bad_question_file_is_refused(make: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    path = tmp_path / "questions"
    make(path)
    with pytest.raises(DataError, match=match) as caught:
        load("jsonl", str(path), json_lines(tmp_path / "corpus", DOCUMENTS))
    assert str(path) in str(caught.value)


CORPUS_FILES = [
    pytest.param([{"title": "t", "text": "x"}], "field 'doc_id' or '_id' or 'id' is missing", id="missing-id"),
    pytest.param([{"doc_id": "A", "title": "t"}], "field 'text' is missing", id="missing-text"),
    pytest.param([{"doc_id": "A", "title": " ", "text": ""}], "'text' of document 'A' is empty", id="empty-text"),
    pytest.param([{"doc_id": "A", "text": 5}], "field 'text' is '5'", id="text-is-a-number"),
    pytest.param([{"doc_id": "A", "title": [], "text": "x"}], "field 'title' is", id="title-is-a-list"),
    pytest.param([*DOCUMENTS, DOCUMENTS[0]], ":4: document 'A' was there before, at number 1", id="duplicate-document"),
    pytest.param(QUESTIONS, "a question where a document should be", id="questions-given-as-corpus"),
]


@pytest.mark.parametrize(("documents", "match"), CORPUS_FILES)
def test_a_bad_corpus_is_refused(documents: list[object], match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        load("jsonl", json_lines(tmp_path / "questions", QUESTIONS), json_lines(tmp_path / "corpus", documents))


def _without(record: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in record.items() if name not in names}


OFFICIAL_FILES = [
    pytest.param(
        "hotpotqa",
        [_without(HOTPOT[0], "supporting_facts")],
        "field 'supporting_facts' is missing",
        id="hotpotqa-test-file",
    ),
    pytest.param(
        "hotpotqa",
        [{**HOTPOT[0], "supporting_facts": [["Ada"]]}],
        r"should be \[title, sent_id\]",
        id="hotpotqa-facts-not-pairs",
    ),
    pytest.param(
        "hotpotqa", [{**HOTPOT[0], "supporting_facts": []}], "'supporting_facts' is empty", id="hotpotqa-no-facts"
    ),
    pytest.param(
        "hotpotqa", [{**HOTPOT[0], "context": "none"}], "field 'context' is 'none'", id="hotpotqa-context-is-a-string"
    ),
    pytest.param(
        "hotpotqa",
        [{**HOTPOT[0], "context": [[3, ["x"]]]}],
        "3 where a title should be",
        id="hotpotqa-title-is-a-number",
    ),
    pytest.param(
        "hotpotqa", [{**HOTPOT[0], "context": [["Ada", 3]]}], "of 'Ada' is 3", id="hotpotqa-sentences-are-a-number"
    ),
    pytest.param(
        "hotpotqa",
        [{**HOTPOT[0], "supporting_facts": [["Zoe", 0]]}],
        "'Zoe' of question '5a' is not in the corpus",
        id="hotpotqa-fact-outside-context",
    ),
    pytest.param("2wiki", [_without(HOTPOT[0], "_id")], "field '_id' or 'id' is missing", id="2wiki-no-id"),
    pytest.param("musique", [{**MUSIQUE[0], "paragraphs": []}], "holds no document", id="musique-no-paragraphs"),
    pytest.param("musique", HOTPOT, "field 'paragraphs' should be a list", id="hotpotqa-file-as-musique"),
    pytest.param(
        "musique",
        [{**MUSIQUE[0], "paragraphs": MUSIQUE[0]["paragraphs"][1:2]}],
        "no paragraph has 'is_supporting'",
        id="musique-not-answerable",
    ),
    pytest.param("hover", HOVER, "data.corpus is missing", id="hover-without-corpus"),
    pytest.param("jsonl", HOTPOT, "data.corpus is missing", id="jsonl-without-corpus"),
]


@pytest.mark.parametrize(("kind", "records", "match"), OFFICIAL_FILES)
def test_a_bad_official_file_is_refused(kind: str, records: list[object], match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        load(kind, array(tmp_path / "file.json", records))


def test_hover_claims_are_no_corpus(tmp_path: Path) -> None:
    path = array(tmp_path / "hover.json", HOVER)
    with pytest.raises(DataError, match=r"give HotpotQA's corpus as data\.corpus"):
        load("hover", path, path)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        pytest.param({"kind": "hotpot"}, "data.kind is 'hotpot'; it should be one of jsonl, beir", id="unknown-kind"),
        pytest.param({"kind": "jsonl"}, "data.questions is missing", id="no-path"),
        pytest.param(
            {"kind": "jsonl", "path": "x", "options": {"n_train": 3}},
            "only kind world is generated",
            id="options-of-a-file",
        ),
        pytest.param(
            {"kind": "world", "split": "eval"}, "split 'eval': there are train, dev, test, all", id="unknown-split"
        ),
        pytest.param({"kind": "world", "limit": 0}, "limit 0: ask for one question", id="limit-of-zero"),
        pytest.param(
            {"kind": "beir", "path": "hf:BeIR/scifact"}, "kind beir reads a folder on disk", id="beir-on-the-hub"
        ),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load_questions(**arguments)  # type: ignore[arg-type]


def test_a_binary_file_without_line_ends_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leret.datasets.records.MAX_RECORD", 1 << 20)
    (tmp_path / "binary").write_bytes(b"\x01\x02\x03\x04" * (1 << 19))
    with pytest.raises(DataError, match="a line is longer than 1 MiB"):
        load_questions("jsonl", str(tmp_path / "binary"))


@pytest.mark.parametrize("compress", [bz2.compress, gzip.compress, zstandard.compress], ids=["bz2", "gzip", "zstd"])
def test_a_small_file_that_grows_is_read_in_pieces(
    compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leret.datasets.records.MAX_RECORD", 1 << 20)
    size = 40 << 20
    (tmp_path / "bomb").write_bytes(compress(bytes(size)))
    lengths = [len(chunk) for chunk in chunks(tmp_path / "bomb")]
    assert sum(lengths) == size
    assert max(lengths) <= 32 << 20
    with pytest.raises(DataError, match="a line is longer than 1 MiB"):
        load_questions("jsonl", str(tmp_path / "bomb"))


def test_a_truncated_file_counts_as_one_skipped_record(tmp_path: Path) -> None:
    (tmp_path / "q.gz").write_bytes(gzip.compress(_MANY)[:-400])
    loaded = load_questions("jsonl", str(tmp_path / "q.gz"), skip_invalid=True)
    assert loaded.skipped == {"truncated": 1}
    assert 0 < len(loaded) < 2000
