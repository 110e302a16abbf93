from itertools import pairwise

import pytest

from leret.core.errors import DataError
from leret.core.types import digest
from leret.datasets.splits import split_of
from tests.datasets.writing import json_lines, load_tasks

BABI = """1 Mary got the milk there.
2 John moved to the bedroom.
3 Where is the milk?\tbedroom\t1 2
4 Sandra went back to the kitchen.
5 John took the milk.
6 Where is the milk? \tbedroom\t5 2
1 John went to the garden.
2 Mary went to the garden.
3 Where is John?\tgarden\t1
"""
BOOK = """The Project Gutenberg eBook, with a licence of its own.
*** START OF THE PROJECT GUTENBERG EBOOK ***

CHAPTER ONE

Mr. Ishmael went down to the sea. “Call me so, if you please.” Nobody called
him anything at all. Alas!

Then the ship of the captain sailed away.
*** END OF THE PROJECT GUTENBERG EBOOK ***
The licence goes on here for many words.
"""
SENTENCES = [
    "Mr. Ishmael went down to the sea.",
    "“Call me so, if you please.”",
    "Nobody called him anything at all.",
    "Then the ship of the captain sailed away.",
]


def babi(tmp_path):
    (tmp_path / "qa2_test.en.txt").write_text(BABI, encoding="utf-8")
    return str(tmp_path / "qa2_test.en.txt")


def noised(tmp_path, **keys):
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    return list(load_tasks("babilong", babi(tmp_path), noise=(str(tmp_path / "book.txt"),), **keys))


def test_the_story_before_a_question_is_its_chunks_and_decides_the_split(tmp_path):
    first, second, third = load_tasks("babilong", babi(tmp_path))
    assert first.id == "qa2_test-3"
    assert first.inputs["chunks"] == ["Mary got the milk there.", "John moved to the bedroom."]
    assert (first.gold, first.answers, first.hops) == (("0", "1"), ("bedroom",), 2)
    assert second.inputs["chunks"][2:] == ["Sandra went back to the kitchen.", "John took the milk."]
    assert second.gold == ("3", "1")  # the order of the file, a question between the lines
    assert third.gold == ("0",)
    assert first.split == second.split == split_of(digest(["Mary got the milk there.", "John moved to the bedroom."]))
    assert third.split == split_of(digest(["John went to the garden.", "Mary went to the garden."]))
    record = {**first.inputs, "id": "qa2_test-3", "answer": "bedroom", "support": [0, 1]}
    record["story"] = record.pop("chunks")
    (task,) = load_tasks("babilong", json_lines(tmp_path / "q.jsonl", [record]))
    assert (task.id, task.text, task.gold, task.answers) == (first.id, first.text, first.gold, first.answers)


def test_facts_keep_their_order_among_sentences_of_the_book_at_places_of_the_noise_seed(tmp_path):
    for task in noised(tmp_path, sentences=9):
        chunks = task.inputs["chunks"]
        facts = [chunk for chunk in chunks if chunk not in SENTENCES]
        noise = [SENTENCES.index(chunk) for chunk in chunks if chunk in SENTENCES]
        assert len(chunks) == 9
        assert facts == list(task.inputs.story)
        assert all(after == (before + 1) % len(SENTENCES) for before, after in pairwise(noise))
        assert all(chunks[int(place)] in facts for place in task.gold)
    second = noised(tmp_path, sentences=9)[1]
    picked = [second.inputs["chunks"][int(place)] for place in second.gold]
    assert picked == ["John took the milk.", "John moved to the bedroom."]

    one, again, other = (noised(tmp_path, sentences=40, noise_seed=seed) for seed in (1, 1, 2))
    assert [dict(t.inputs) for t in one] == [dict(t.inputs) for t in again]
    assert [t.gold for t in one] != [t.gold for t in other]
    tasks = [t for seed in range(9) for t in noised(tmp_path, sentences=[6, 8], noise_seed=seed)]
    assert {len(t.inputs["chunks"]) for t in tasks} == {6, 8}


@pytest.mark.parametrize(
    ("line", "says"),
    [("a story without a number", "not a bAbI line"), ("3 Where is John?\tgarden\t9", "from 0 to 1"),
     ("3 Where is John?\tgarden", "from 0 to 1")],
)  # fmt: skip
def test_bad_lines_are_refused_with_their_place(tmp_path, line, says):
    file = tmp_path / "qa1.txt"
    file.write_text(f"1 A fact.\n2 Another one.\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"qa1\.txt:3: .*{says}"):
        load_tasks("babilong", str(file))
