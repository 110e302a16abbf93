from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from leret.core.errors import TrainingError
from leret.policies.local.chat_template import end_token
from leret.training.data import TokenEncoder, TrainingExample, examples_digest
from tests.first_steps import read_lines, succeeds

EXAMPLE = TrainingExample("q1", ({"role": "user", "content": "who wrote the book"},), ("book author", "the author"))


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.mark.parametrize(("form", "columns"), [("sft", set()), ("kto", {"label"})])
def test_an_export_has_the_rows_that_a_trainer_of_trl_reads(run, tmp_path, form, columns):
    for out in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        succeeds("store", "export", "--run", run.path, "--out", out, "--form", form)
    rows = read_lines(tmp_path / "rows.jsonl")
    assert rows == pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == {"sft": 24, "kto": 48}[form]
    assert set(rows[0]) == {"prompt", "completion", "question_id", "is_cut"} | columns
    assert rows[0]["completion"][0]["role"] == "assistant"
    if form == "kto":
        assert sum(row["label"] for row in rows) == 24


END = 5


def encoded(tokenizer, text, ids=None, is_cut=False, **how):
    example = TrainingExample("q1", EXAMPLE.prompt, (text,), is_cut=(is_cut,), token_ids=(ids,))
    return TokenEncoder(tokenizer, end_token(tokenizer, [END])).encode([example], **how)[0].completions[0]


def test_a_cut_completion_has_no_end_token(tokenizer):
    book, author = tokenizer.convert_tokens_to_ids(["book", "author"])
    assert encoded(tokenizer, "book author") == [book, author, END]
    assert encoded(tokenizer, "book author", is_cut=True) == [book, author]
    assert encoded(tokenizer, "book author", (book, author), is_cut=True) == [book, author]
    assert encoded(tokenizer, "book author", (book, author)) == [book, author, END]


def test_sampled_ids_are_trained_if_they_are_the_text(tokenizer):
    system, book, author = tokenizer.convert_tokens_to_ids(["<|system|>", "book", "author"])
    assert encoded(tokenizer, "book", (system, book, END)) == [system, book, END]  # the text omits special tokens
    assert encoded(tokenizer, "book", (book, author)) == [book, END]  # a stop string removed the rest
    for ids, says in (
        ((author, END), "for the completion"),
        ((END, author), "that go on after an end token"),
        ((10_000,), "but the vocabulary has"),
    ):
        assert encoded(tokenizer, "book", ids) == [book, END]  # another model's tokenizer
        with pytest.raises(TrainingError, match=f"question q1: the sampler sent token ids .*{says}"):
            encoded(tokenizer, "book", ids, same_tokenizer=True)


def test_the_digest_of_examples_covers_endings_and_ids():
    one = replace(EXAMPLE, completions=("book",))
    names = {examples_digest([replace(one, **keys)]) for keys in ({}, {"is_cut": (True,)}, {"token_ids": ((7,),)})}
    assert len(names) == 3
    assert examples_digest([replace(one, is_cut=(False,), token_ids=(None,))]) == examples_digest([one])
