from collections import Counter

import pytest

from leret.config.data import QUESTIONS_ALONE
from leret.core.errors import DataError
from leret.datasets.formats import READERS, detect_kind
from leret.datasets.splits import split_of
from tests.datasets.writing import DOCUMENTS, HOTPOT, HOVER, MUSIQUE, QUESTIONS, array, json_lines, load, load_tasks

ASKED = [{"id": f"q{i}", "question": f"Which {i}?", "relevant_doc_ids": ["A"]} for i in range(200)]


def test_larger_limit_only_adds_in_any_order_of_the_file_and_parts_are_disjoint(tmp_path):
    path, turned = json_lines(tmp_path / "q", ASKED), json_lines(tmp_path / "turned", ASKED[::-1])

    def train(path=path, **keys):
        return load_tasks("jsonl", path, split="train", **keys).items

    few, more = train(limit=10), train(limit=40)
    assert more[:10] == few == train(turned, limit=10)
    assert train(limit=10, seed=1) != few

    parts = [{*train(limit=30, part=f"{i}/3")} for i in range(3)]
    assert [len(part) for part in parts] == [10, 10, 10]
    assert set.union(*parts) == {*train(limit=30)}
    assert all({*train(part=f"{i}/3")} > part for i, part in enumerate(parts))


def test_splits_are_fixed_for_good_and_have_their_shares():
    names = [split_of(f"question-{i}") for i in range(12)]
    expected = ["train", "train", "test", "test", "train", "test", "train", "train", "train", "test", "train", "test"]
    assert names == expected, "a change here moves questions between training and evaluation in every run"
    assert split_of("\ud800 is half a pair") in {"train", "dev", "test"}
    counts = Counter(split_of(f"q{i}") for i in range(20_000))
    # standard deviations of the shares at n = 20,000: .0028 for .2 and .0021 for .1
    assert counts["test"] / 20_000 == pytest.approx(0.2, abs=0.012)
    assert counts["dev"] / 20_000 == pytest.approx(0.1, abs=0.009)


def test_a_split_in_the_file_wins_over_the_hash(tmp_path):
    names = ("train", "validation", "test")
    records = [{**record, "split": names[i % 3]} for i, record in enumerate(ASKED[:9])]
    path = json_lines(tmp_path / "q", records)
    assert [q.id for q in load_tasks("jsonl", path, split="dev")] == ["q1", "q4", "q7"]
    with pytest.raises(DataError, match="no question in split dev; available: 1 in test, 2 in train"):
        load_tasks("jsonl", json_lines(tmp_path / "few", [*records[2:4], records[0]]), split="dev")


def test_held_out_is_split_test_and_questions_with_its_texts(tmp_path):
    splits = [("a", "one", "train"), ("b", "two", "test"), ("c", "two", "train"), ("d", "three", "dev")]
    records = [{"id": i, "question": text, "relevant_doc_ids": ["A"], "split": split} for i, text, split in splits]
    path = json_lines(tmp_path / "q", records)
    found = [load_tasks("jsonl", path, split=split, limit=1).held_out for split in ("train", "test")]
    assert found == [{"b", "c"}, {"b", "c"}]


def test_skipped_records_are_counted_by_kind_and_the_rest_is_read(tmp_path):
    path = json_lines(tmp_path / "q", [ASKED[1], {"id": "q2"}, ASKED[1], {**ASKED[3], "relevant_doc_ids": ["Z"]}, 7])
    corpus = json_lines(tmp_path / "c", [*DOCUMENTS, {"doc_id": "D"}])
    data = load("jsonl", path, corpus, skip_invalid=True)
    assert [q.id for q in data.tasks] == ["q1"]
    assert data.tasks.skipped == {"not an object": 1, "missing field": 1, "duplicate id": 1, "unknown gold": 1}
    assert data.problems.kinds == {"missing field": 1}


SAME = [
    {"id": "1", "question": "Who?", "relevant_doc_ids": "A", "answer": "Ada"},
    {"id": "2", "question": "Where?", "relevant_doc_ids": "C", "type": "place"},
    {"id": "1", "question": "Who?", "relevant_doc_ids": ["B", "A"], "relevance": {"B": 1, "A": 2}, "type": "person"},
    {"id": "3", "question": "Who?", "relevant_doc_ids": "C", "answers": ["Byron", "Ada"], "hops": 2},
]


def test_equal_questions_are_merged_with_all_answers_and_gold(tmp_path):
    path, corpus = json_lines(tmp_path / "q", SAME), json_lines(tmp_path / "c", DOCUMENTS)
    tasks = load("jsonl", path, corpus, merge_questions=True).tasks
    who, where = tasks
    assert (who.id, who.gold, who.answers, who.type, who.hops) == ("1", ("A", "B", "C"), ("Ada", "Byron"), "person", 2)
    assert who.grades == {"A": 2, "B": 1, "C": 1}
    assert (where.id, where.gold, where.type, where.relevance) == ("2", ("C",), "place", {})
    assert tasks.n_merged == 2
    with pytest.raises(DataError, match=r":3: duplicate id '1', first used at line or item 1; data\.merge_questions"):
        load("jsonl", path, corpus)

    other = json_lines(tmp_path / "q", [SAME[0], {**SAME[1], "id": "1"}])  # an id of two different questions
    with pytest.raises(DataError, match=r":2: duplicate id '1', first used at line or item 1\n"):
        load_tasks("jsonl", other, merge_questions=True)


def test_a_merged_question_is_in_one_split(tmp_path):
    asked = [{**ASKED[i], "question": f"Which {i % 50}?", "id": f"q{i}"} for i in range(200)]
    path = json_lines(tmp_path / "q", asked)
    split = {name: list(load_tasks("jsonl", path, split=name, merge_questions=True)) for name in ("train", "test")}
    ids = {task.id for tasks in split.values() for task in tasks}
    assert ids <= {f"q{i}" for i in range(50)}
    assert not {task.text for task in split["train"]} & {task.text for task in split["test"]}
    path = json_lines(tmp_path / "q", [{**SAME[0], "split": "train"}, {**SAME[3], "split": "test"}, SAME[1]])
    assert [task.split for task in load_tasks("jsonl", path, merge_questions=True)] == ["test", None]


def test_unknown_options_of_the_world_are_refused():
    for options, says in (({"n_trian": 3}, "'n_trian' of .*available: n_train"), ({"n_train": "many"}, "'many'")):
        with pytest.raises(DataError, match=says):
            load("world", options=options)


def changed(record, **fields):
    return [{name: value for name, value in {**record, **fields}.items() if value is not None}]


FILES = {
    "a test file without facts": ("hotpotqa", changed(HOTPOT[0], supporting_facts=None), "facts' is missing"),
    "a fact of no document": ("hotpotqa", changed(HOTPOT[0], supporting_facts=[["Zoe", 0]]), "'Zoe' of question '5a'"),
    "no id": ("2wiki", changed(HOTPOT[0], _id=None), "'_id' or 'id' is missing"),
    "another set's file": ("musique", HOTPOT, "'paragraphs' should be a list"),
    "no answer in any": ("musique", changed(MUSIQUE[0], paragraphs=MUSIQUE[0]["paragraphs"][1:2]), "'is_supporting'"),
    "an unknown kind": ("hotpot", HOTPOT, "data.kind 'hotpot'; did you mean hotpotqa.*available: jsonl, beir"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "records", "says"), FILES.values(), ids=FILES)
def test_bad_sources_are_refused(form, records, says, tmp_path):
    with pytest.raises(DataError, match=says):
        load(form, array(tmp_path / "file.json", records))


KINDS = {
    "jsonl": QUESTIONS,
    "hotpotqa": HOTPOT,
    "hover": HOVER,
    "musique": MUSIQUE,
    "2wiki": [{**HOTPOT[0], "evidences": []}],
}


def test_kind_is_detected_by_the_first_record(tmp_path):
    for kind, records in KINDS.items():
        assert detect_kind(json_lines(tmp_path / "q", records)) == kind
    assert detect_kind(json_lines(tmp_path / "q", [{"qid": 1}])) == "jsonl"
    assert detect_kind(str(tmp_path)) == "beir"
    (tmp_path / "1_A_QA").mkdir()
    (tmp_path / "1_A_QA/1.xml").write_text("<Document/>")
    assert detect_kind(str(tmp_path)) == "medquad"


def test_the_kinds_that_need_a_corpus_are_known_to_recipes():
    assert {kind for kind, reader in READERS.items() if not reader.brings_documents} == QUESTIONS_ALONE


def test_gold_documents_are_parents_of_chunks_if_the_data_say_so(tmp_path):
    chunks = [{"doc_id": f"A#{i}", "text": "x", "parent": "A"} for i in range(2)]
    corpus = json_lines(tmp_path / "c", [*chunks, {"doc_id": "B", "text": "y"}])
    questions = json_lines(tmp_path / "q", [{"id": "q", "question": "?", "relevant_doc_ids": ["A", "B"]}])
    data = load("jsonl", questions, corpus, gold="parent")
    [task] = data.tasks
    assert (task.gold, task.gold_ids(["A#1", "A#0", "B"])) == (("A", "B"), ["A", "B"])
    with pytest.raises(DataError, match=r"'A' of question 'q' .* set data\.gold: parent"):
        load("jsonl", questions, corpus)
    with pytest.raises(DataError, match=r"data\.gold is parent, .* set data\.corpus"):
        load_tasks("jsonl", questions, gold="parent")
    chunk = json_lines(tmp_path / "q", [{"id": "q", "question": "?", "relevant_doc_ids": ["A#1"]}])
    assert [task.gold for task in load("jsonl", chunk, corpus).tasks] == [("A#1",)]
    with pytest.raises(DataError, match="'A#1' of question 'q' is not in the corpus"):
        load("jsonl", chunk, corpus, gold="parent")
