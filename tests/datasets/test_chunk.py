import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import Document
from leret.datasets.chunk import chunks_of, count_words, token_counter, write_chunks
from leret.datasets.corpus import Corpus
from tests.datasets.writing import json_lines, load
from tests.first_steps import read_lines, refused, succeeds

TEXT = 'Dr. Smith met J. K. Rowling. "Really?" she said. It was 3.14 m long, e.g. too long!\n\nA new paragraph.'
SENTENCES = [
    "Dr. Smith met J. K. Rowling.",
    '"Really?" she said.',
    "It was 3.14 m long, e.g. too long!",
    "A new paragraph.",
]
TOKENS = token_counter("leret-english-6m")
PARTS = [*"aZé.?!\n ", " and ", "Mr. ", "\U0001f600", "end. ", "\ud800"]


def texts(text, size, count=count_words, **options):
    return [chunk.text for chunk in chunks_of(Document("d", "", text), size, count, **options)]


def test_a_chunk_ends_with_a_sentence_or_a_word_if_it_fits():
    assert texts(TEXT, 8) == SENTENCES
    assert texts(TEXT, 9) == [f"{SENTENCES[0]} {SENTENCES[1]}", *SENTENCES[2:]]
    assert texts("one two three four. Five.", 2) == ["one two", "three four.", "Five."]
    assert texts("一つ。二つ。", 1) == ["一つ。二つ。"]  # one word
    pieces = texts("x" * 100, 12, TOKENS)
    assert (len(pieces) > 1, "".join(pieces)) == (True, "x" * 100)


@pytest.mark.parametrize("count", [count_words, TOKENS])
@settings(max_examples=15)
@given(text=st.lists(st.sampled_from(PARTS), max_size=60).map("".join), size=st.integers(8, 20))
def test_no_word_is_lost_and_no_chunk_is_too_long(count, text, size):
    pieces = texts(text, size, count)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(n <= size for n in count(pieces))
    if count is count_words:  # which splits no word
        assert " ".join(pieces).split() == text.split()


def test_title_and_header_count_and_leave_half_of_the_tokens_to_the_text():
    document = Document("d", "The title", "One two three. Four five six. Seven.")
    texts = [f"d: The title\n{sentence}" for sentence in ("One two three.", "Four five six. Seven.")]
    assert list(chunks_of(document, 8, count_words, "{doc_id}: {title}")) == [
        Document(f"d#{i}", "The title", text, "d") for i, text in enumerate(texts)
    ]
    assert list(chunks_of(Document("d", "Title", ""), 8, count_words)) == [Document("d#0", "Title", "", "d")]
    assert [c.parent for c in chunks_of(Document("d#0", "", "A. B.", "d"), 8, count_words)] == ["d"]


def test_chunks_are_a_corpus_that_keeps_parents(tmp_path):
    json_lines(tmp_path / "c.jsonl", [{"doc_id": "d", "title": "T", "text": TEXT}, {"doc_id": "e", "text": "Short."}])
    command = ["data", "chunk", tmp_path / "c.jsonl", "--tokens", "8", "--out", tmp_path / "chunks.jsonl"]
    out = succeeds(*command)
    lines = read_lines(tmp_path / "chunks.jsonl")
    assert f"{len(lines)} chunks of 2 documents" in out
    assert lines[-1] == {"doc_id": "e#0", "title": "", "text": "Short.", "parent": "e"}
    json_lines(tmp_path / "q.jsonl", [{"question": "?", "relevant_doc_ids": ["d"]}])
    corpus = load("jsonl", str(tmp_path / "q.jsonl"), str(tmp_path / "chunks.jsonl"), gold="parent").corpus
    assert corpus.parents == {line["doc_id"]: line["parent"] for line in lines}
    assert json.loads(succeeds(*command, "--tokenizer", "leret-english-6m", "--json"))["n_documents"] == 2


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"fields \{title\} and \{doc_id\}"):
        write_chunks(Corpus([]), tmp_path / "out", 8, count_words, "{name}")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        token_counter(str(tmp_path))
    with pytest.raises(RetrievalError, match="--tokenizer: no model directory"):
        token_counter(str(tmp_path / "none"))
    corpus = json_lines(tmp_path / "c.jsonl", [{"doc_id": "d", "text": "x"}])
    assert "is the corpus itself" in refused("data", "chunk", corpus, "--out", corpus)
