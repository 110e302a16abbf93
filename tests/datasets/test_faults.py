"""Each fault of a data file is read rightly, refused with its place, or counted in a message."""

import gzip
import re

import pyarrow
import pyarrow.parquet
import pytest

from leret.core.errors import DataError
from leret.datasets.load import UNSPLIT
from tests.datasets.writing import (
    HOTPOT,
    HOVER,
    MUSIQUE,
    PLACES,
    array,
    csv_table,
    inspect,
    json_lines,
    load,
    load_tasks,
)

CORPUS = [{"doc_id": f"d{i}", "title": f"T{i}", "text": f"text {i}"} for i in range(4)]
ASKED = {"id": "q1", "question": "Who?", "relevant_doc_ids": "d1", "answer": "Ada"}


@pytest.fixture(params=PLACES, ids=lambda write: write.__name__)
def write(request):
    return request.param


READ = {  # changes of the record: gold documents and answers in every format
    "blank answer": ({"answer": ""}, ("d1",), ()),
    "blank among answers": ({"answer": None, "answers": ["Ada", "", " "]}, ("d1",), ("Ada",)),
    "bracket in an answer": ({"answer": "[sic] Ada"}, ("d1",), ("[sic] Ada",)),
    "blank gold": ({"relevant_doc_ids": " "}, (), ("Ada",)),
    "two gold documents as a list": ({"relevant_doc_ids": ["d1", "d2"]}, ("d1", "d2"), ("Ada",)),
    "gold by |": ({"relevant_doc_ids": "d1|d2"}, ("d1", "d2"), ("Ada",)),
    "gold by spaces": ({"relevant_doc_ids": " d1  d2"}, ("d1", "d2"), ("Ada",)),
    "blank hops, type and split": ({"hops": "", "type": "", "split": ""}, ("d1",), ("Ada",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", READ)
def test_a_record_means_the_same_in_every_format(write, fault, tmp_path):
    change, gold, answers = READ[fault]
    rows = [{**ASKED, **change}] if "answers" not in change else [{**ASKED, **change, "answer": None}]
    [task] = load("jsonl", write(tmp_path / "q", rows), write(tmp_path / "c", CORPUS)).tasks
    assert (task.gold, task.answers, task.hops, task.type, task.split) == (gold, answers, None, None, None)


REFUSED = {  # changes of the second record
    "blank id": ({"id": " "}, "'id' is empty"),
    "the same id": ({"id": "q1", "question": "Where?"}, "duplicate id 'q1'"),
    "blank question": ({"question": ""}, "'question' is empty"),
    "no gold and no answer": ({"relevant_doc_ids": "", "answer": " "}, "no 'relevant_doc_ids'"),
    "unknown gold": ({"relevant_doc_ids": "d9"}, "document 'd9' of question 'q2'"),
    "broken list": ({"relevant_doc_ids": '["d1", '}, "a list in JSON"),
    "unknown split": ({"split": "Train"}, "'split' is 'Train'"),
    "hops in words": ({"hops": "two"}, "'hops' is 'two'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_bad_record_is_refused_with_its_place_in_every_format(write, fault, tmp_path):
    change, says = REFUSED[fault]
    rows = [{**ASKED, **dict.fromkeys(change, ""), **ASKED}, {**ASKED, "id": "q2", **change}]
    path = write(tmp_path / "q", rows)
    with pytest.raises(DataError, match=re.escape(PLACES[write].format(path)) + f".*{re.escape(says)}"):
        load("jsonl", path, write(tmp_path / "c", CORPUS))
    skipped = load("jsonl", path, write(tmp_path / "c", CORPUS), skip_invalid=True).tasks
    assert ([task.id for task in skipped], sum(skipped.skipped.values())) == (["q1"], 1)


DOCUMENTS = {
    "the same id": ({"doc_id": "d0"}, "duplicate id 'd0'"),
    "blank id": ({"doc_id": ""}, "'doc_id' is empty"),
    "blank text and title": ({"text": " ", "title": ""}, "'text' of document 'd1' is empty"),
}


@pytest.mark.parametrize("fault", DOCUMENTS)
def test_a_bad_document_is_refused_with_its_place_in_every_format(write, fault, tmp_path):
    change, says = DOCUMENTS[fault]
    path = write(tmp_path / "c", [CORPUS[0], {**CORPUS[1], **change}])
    with pytest.raises(DataError, match=re.escape(PLACES[write].format(path)) + f".*{re.escape(says)}"):
        load("jsonl", write(tmp_path / "q", [{**ASKED, "relevant_doc_ids": "d0"}]), path)


@pytest.mark.parametrize("mark", [{"is_impossible": True}, {"answerable": False}])
def test_unanswerable_questions_are_left_out_and_counted(write, mark, tmp_path):
    rows = [{**ASKED, **{name: not value for name, value in mark.items()}}, {**ASKED, "id": "q2", **mark}]
    loaded = load("jsonl", write(tmp_path / "q", rows), write(tmp_path / "c", CORPUS)).tasks
    assert ([task.id for task in loaded], loaded.skipped) == (["q1"], {"marked as unanswerable": 1})


HEAD = "id,question,relevant_doc_ids\n"
ROWS = [f"q{i},Who is {i}?,d{i % 4}\n" for i in range(20)]
GZIP = gzip.compress((HEAD + "".join(ROWS)).encode())
JSON = '{"id": "q1", "question": "Who?", "relevant_doc_ids": "d1"}\n'
FILES = {  # name, content, then the ids that are read, or the place of the fault
    "CSV: stray quote": ("q.csv", HEAD + ROWS[0] + 'q1,"what,d1\n' + "".join(ROWS[2:]), "q.csv:3: "),
    "CSV: stray quote that closes inside a row": ("q.csv", HEAD + 'q0,"what,d0\nq1,"who",d1\n' + ROWS[2], "q.csv:2: "),
    "CSV: stray quote in the header": ("q.csv", 'id,"question,relevant_doc_ids\n' + ROWS[0] + ROWS[1], "q.csv:1: "),
    "CSV: two columns of one name":
        ("q.csv", "id,question,question,relevant_doc_ids\nq1,a,b,d1\n", "q.csv:1: .*'question'"),
    "CSV: row too long": ("q.csv", HEAD + "q1,Who, then?,d1\n", "q.csv:2: 4 cells"),
    "CSV: row too short": ("q.csv", HEAD + ROWS[0] + "q1,Who?", "q.csv:3: 2 cells"),
    "CSV: NUL": ("q.csv", HEAD + "q1,Wh\0o?,d1\n", "q.csv:2: .*NUL"),
    "CSV: Latin 1": ("q.csv", (HEAD + ROWS[0] + "q1,Caf\u00e9?,d1\n").encode("latin-1"), "q.csv:3: .*not UTF-8"),
    "CSV: UTF-16": ("q.csv", (HEAD + ROWS[0]).encode("utf-16"), "q.csv is UTF-16"),
    "CSV: cut gzip": ("q.csv.gz", GZIP[:-20], "q.csv.gz: .*ends early"),
    "JSON: broken gzip": ("q.jsonl.gz", GZIP[:30] + b"x" * 30 + GZIP[60:], "q.jsonl.gz: .*compressed file is broken"),
    "CSV: no header": ("q.csv", ROWS[0] + ROWS[1], "q.csv:2: field 'question' or 'query' is missing"),
    "TSV: quotes are characters":
        ("q.tsv", 'id\tquestion\tanswer\nq1\t"Heroes\t1977\nq2\tA single is 7"\tyes\n', ["q1", "q2"]),
    "TSV: tab in a cell": ("q.tsv", 'id\tquestion\tanswer\nq1\t"Who\tis?"\tAda\n', "q.tsv:2: 4 cells"),
    "JSON: byte order mark, CRLF and blank lines":
        ("q.jsonl", "\ufeff" + (JSON + "\n  \n").replace("\n", "\r\n"), ["q1"]),
    "JSON: key twice":
        ("q.jsonl", JSON + '{"id": "q2", "question": "a", "question": "b"}\n', "q.jsonl:2: .*'question'"),
    "JSON: long number": ("q.jsonl", '{"id": %s}\n' % ("9" * 5000), "q.jsonl:1: "),
    "JSON array: cut off in a string": ("q.json", '[{"a": 1}, {"a": "x', "q.json: .*item 2: broken JSON"),
    "JSON array: nested too deep": ("q.json", '[{"a":' + '{"a":' * 100_000, "q.json: .*nested more than 200 deep"),
    "JSON: nested too deep": ("q.jsonl", JSON + '{"a": ' + "[" * 100_000, "q.jsonl:2: broken JSON"),
    "JSON: empty": ("q.jsonl", "", "q.jsonl.*is empty"),
    "JSON: cut": ("q.jsonl", JSON + JSON[:30], "q.jsonl:2: broken JSON"),
    "JSON: not UTF-8": ("q.jsonl", JSON.encode() + b'{"id": "\xff"}\n', "q.jsonl:2: not UTF-8"),
    "JSON: id as a fraction": ("q.jsonl", JSON.replace('"q1"', "1.0"), "q.jsonl:1: .*'id' is '1.0'"),
    "JSON: number as an answer":
        ("q.jsonl", JSON.replace('"d1"', '"d1", "answer": 1.5'), "q.jsonl:1: .*'answer' is '1.5'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_a_file_is_read_or_refused_with_the_place(fault, tmp_path):
    name, content, expected = FILES[fault]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, list):
        assert [task.id for task in load_tasks("jsonl", str(tmp_path / name))] == expected
        return
    for skip_invalid in (False, True) if "stray quote" in fault else (False,):
        with pytest.raises(DataError, match=f"(?s){expected}"):
            load_tasks("jsonl", str(tmp_path / name), skip_invalid=skip_invalid)


@pytest.mark.parametrize(("first", "last"), [(3, 16), (0, 19)])
def test_rows_between_two_stray_quotes_are_refused(first, last, tmp_path):
    rows = list(ROWS)
    rows[first] = rows[first].replace(",Who", ',"Who')
    rows[last] = rows[last].replace("?,", '?",')
    path = tmp_path / "q.csv"
    path.write_text(HEAD + "".join(rows) + "q20,Who?,d1\n", encoding="utf-8")
    for skip_invalid in (False, True):
        with pytest.raises(DataError, match=rf"q\.csv:{first + 2}: .* joins {last - first + 1} lines"):
            load_tasks("jsonl", str(path), skip_invalid=skip_invalid)


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    cells = pyarrow.array(["q1"]), pyarrow.array(["a"]), pyarrow.array(["b"])
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(cells, ["id", "question", "question"]), tmp_path / "q")
    with pytest.raises(DataError, match="q: column 'question' occurs more than once"):
        load_tasks("jsonl", str(tmp_path / "q"))


def test_ids_in_a_cell_are_split_by_the_corpus(tmp_path):
    corpus = [{"doc_id": id, "text": "x"} for id in ("Paris, Texas", "Paris", "Texas", "a|b", "Ed Wood")]
    rows = [{**ASKED, "id": id, "relevant_doc_ids": id} for id in ("Paris, Texas", "a|b", "Ed Wood; Paris, Texas")]
    questions = csv_table(tmp_path / "q", rows)
    tasks = load("jsonl", questions, csv_table(tmp_path / "c", corpus)).tasks
    assert [task.gold for task in tasks] == [("Paris, Texas",), ("a|b",), ("Ed Wood", "Paris, Texas")]

    alone = load_tasks("jsonl", questions)  # without a corpus they are counted
    assert (alone.skipped, alone.items[1].gold) == ({UNSPLIT: 3}, ("a|b",))

    chunks = [{"doc_id": f"{parent}#0", "text": "x", "parent": parent} for parent in "AB"]
    questions = csv_table(tmp_path / "q", [{**ASKED, "relevant_doc_ids": "A;B"}])
    [task] = load("jsonl", questions, json_lines(tmp_path / "c", chunks), gold="parent").tasks
    assert task.gold == ("A", "B")


@pytest.mark.parametrize("kind", ["2wiki", "hotpotqa"])
def test_the_first_text_of_a_title_counts_in_every_kind(kind, tmp_path):
    record = {**HOTPOT[0], "context": [*HOTPOT[0]["context"], ["Ada", ["Ada is a language."]]]}
    path, text = array(tmp_path / "w.json", [record, HOTPOT[1]]), "Ada wrote. She was Byron's."
    corpus = load(kind, path).corpus
    assert (corpus["Ada"].text, corpus.skipped) == (text, {"document with an id of another text": 1})
    assert inspect(kind, path).skipped == {"document with an id of another text": 1}
    first, *others = load_tasks("episodes", path).items[0].inputs["chunks"]
    assert (first["id"], first["text"], [chunk["id"] for chunk in others]) == ("Ada", text, ["Byron", "Café"])


OFFICIAL = {  # kind, record, then the answers of the task, or the refusal
    "blank answer": ("musique", {**MUSIQUE[0], "answer": " ", "answer_aliases": ["", "Anne"]}, ("Anne",)),
    "gold as text":
        ("musique", {**MUSIQUE[0], "paragraphs": [{**MUSIQUE[0]["paragraphs"][0], "is_supporting": "false"}]},
                     "m:1: .*'is_supporting' is 'false'"),
    "number as a title": ("hotpotqa", {**HOTPOT[0], "supporting_facts": [["Ada", 0], [7, 0]]}, "m:1: .*has 7 in place"),
    "label as a number": ("hover", {**HOVER[0], "label": 1}, ("SUPPORTED",)),
    "unknown label": ("hover", {**HOVER[0], "label": "MAYBE"}, "m:1: .*'label' is 'MAYBE'"),
    "null id of a chunk": ("chunks", {"id": "q", "question": "?", "answer": "x", "support": ["0"],
                                      "chunks": [{"id": None, "text": "a"}]}, ("x",)),
    "gold twice in chunks": ("chunks", {"id": "q", "question": "?", "chunks": ["a"], "support": [0],
                                        "relevant_doc_ids": ["0"]}, "m:1: .*'relevant_doc_ids'"),
    "split of babilong": ("babilong", {"id": "q", "question": "?", "answer": "x", "story": ["A."], "support": [0],
                                       "split": "train set"}, "m:1: .*'split' is 'train set'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OFFICIAL)
def test_marks_and_fields_of_official_formats(fault, tmp_path):
    kind, record, expected = OFFICIAL[fault]
    path = json_lines(tmp_path / "m", [record])
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            load_tasks(kind, path)
    else:
        [task] = load_tasks(kind, path)
        assert task.answers == expected


BABI = ["1 Mary went home.\n", "2 John went out.\n", "3 Where is Mary?\thome\t1\n",
        "1 Ann sat.\n", "2 Where is Ann?\there\t1\n"]  # fmt: skip


@pytest.mark.parametrize(("lost", "n_bad"), [(0, 2), (1, 1)])
def test_a_story_that_lacks_a_line_is_refused_to_its_end(lost, n_bad, tmp_path):
    (tmp_path / "b.txt").write_text("".join(BABI[:lost] + BABI[lost + 1 :]))
    with pytest.raises(DataError, match=rf"b\.txt:{lost + 1}: line {lost + 2} of the story"):
        load_tasks("babilong", str(tmp_path / "b.txt"))
    loaded = load_tasks("babilong", str(tmp_path / "b.txt"), skip_invalid=True)
    assert (len(loaded), loaded.skipped) == (1, {"broken line": n_bad})
