import gzip
import json

import pytest

from leret.core.errors import DataError
from leret.core.types import Task
from leret.datasets.leaks import FINGERPRINTS, find_leaks, fingerprint, refuse_leaks
from leret.datasets.splits import split_of
from models.fingerprints import write_fingerprints

TRAINED = [
    Task.question("t1", "Who directed Ed Wood?", gold=("a", "b")),
    Task.question("t2", "Which city is older: Bath or Köln?", gold=("c",)),
    Task.question("t3", "Where was Beyoncé born?", gold=("d", "e")),
]


@pytest.mark.parametrize(
    ("planted", "kind", "training_id"),
    [
        (Task.question("t1", "Another text"), "id", "t1"),
        (Task.question("x", "WHO DIRECTED  ed wood"), "text", "t1"),
        (Task.question("x", "where was BEYONCE born"), "text", "t3"),
        (Task.question("x", "Is Köln or Bath older: which city?"), "words", "t2"),
        (Task.question("x", "What else?", gold=("b", "a")), "gold", "t1"),
        (Task.question("x", "Pretrained, was it?"), "pretraining", None),
    ],
)
def test_a_planted_leak_is_found_with_its_training_question(planted, kind, training_id):
    clean = Task.question("y", "Who wrote Ed Wood?", gold=("a",))
    leaks = find_leaks([clean, planted], TRAINED, {fingerprint("it was pretrained")})
    assert leaks["examples"] == [{"id": planted.id, "kind": kind, "training_id": training_id}]
    assert leaks["by_kind"][kind] == 1
    assert "1 of 2 questions resembles one of 3 training questions" in leaks["verdict"]


def reply(id, history, answer, persona=("i sing",)):
    return Task(id, {"persona": list(persona), "history": history}, answers=(answer,))


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (reply("x", ["Hi, you", "it is you ?"], "Yes, it is me"), "reply"),  # from the other side
        (reply("x", ["so"], "Hi you"), None),  # too short
        (reply("x", ["so"], "i sing a lot"), "reply"),
        (reply("x", ["hi you"], "it is you ?", ("sing i",)), "words"),
    ],
)
def test_turns_of_a_training_dialogue_are_found(planted, kind):
    trained = [
        reply("t1", ["hi you"], "it is you ?"),
        reply("t2", ["hi you", "it is you ?", "yes it is me"], "i sing a lot"),
    ]
    leaks = find_leaks([planted], trained)
    assert [kind for kind, n in leaks["by_kind"].items() if n] == ([kind] if kind else [])
    assert f"{'1' if kind else 'none'} of 1 questions resembles one of 2" in leaks["verdict"]


def test_a_shared_gold_document_is_a_note():
    clean = [Task.question("x", "Who?", gold=("c",)), Task.question("y", "?!", gold=("a", "c")), Task.question("z", "")]
    leaks = find_leaks(clean, [*TRAINED, Task.question("t4", "!")], (), ["demo"])
    assert (leaks["examples"], leaks["n_shared_gold"]) == ([], 2)
    assert leaks["verdict"].startswith("leak check: passed, none of 3 questions resembles")
    shared, unknown = leaks["verdict"].split("; ")[1:]
    assert shared.startswith("2 share only a gold document")
    assert "the texts that demo learned from" in unknown


def test_the_default_split_of_hotpotqa_is_clean_but_for_gold_pairs(shared_data):
    data = (shared_data / "hotpotqa/queries_all.jsonl.gz").read_bytes()
    rows = map(json.loads, gzip.decompress(data).splitlines())
    tasks = [Task.question(row["id"], row["question"], gold=row["relevant_doc_ids"]) for row in rows]
    sides = [[task for task in tasks if (split_of(task.id) == "test") == tested] for tested in (True, False)]
    by_kind = find_leaks(*sides)["by_kind"]
    assert {kind for kind, n in by_kind.items() if n} == {"gold"}
    assert by_kind["gold"] < len(sides[0]) / 100


def test_fingerprints_are_written_without_the_texts(tmp_path):
    write_fingerprints(tmp_path, ["Who is it?", "is it who", "Ed Wood"])
    lines = (tmp_path / FINGERPRINTS).read_text().splitlines()
    assert lines == sorted({fingerprint("who is it"), fingerprint("ed wood")})
    assert "Wood" not in str(lines)


def test_a_refused_leak_names_the_first_questions_and_counts_the_others():
    with pytest.raises(DataError, match=r"7 questions.*'q0', 'q1', 'q2', 'q3', 'q4' and 2 more"):
        refuse_leaks(*([Task.question(f"q{i}", f"{n} {i}") for i in range(n)] for n in (7, 9)))
