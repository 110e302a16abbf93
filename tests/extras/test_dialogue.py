import json

import pytest

from leret.config.data import DataSettings
from leret.core.errors import DataError
from leret.datasets.formats import detect_kind
from leret.datasets.load import load, load_tasks

CONVAI2 = """\
1 your persona: i like tea .
2 your persona: i have a dog .
3 partner's persona: i am tall .
4 __SILENCE__\thi , who are you ?
5 i am tall . and you ?\ti have a dog .\t\tno .|yes .
6 hi\thi
1 your persona: i sing .
2 hello\tla la la .\t\tno .
"""


def settings(path, **keys):
    return DataSettings.model_validate({"kind": "dialogue", "questions": str(path), "split": "all", **keys})


@pytest.fixture
def convai2(tmp_path):
    path = tmp_path / "valid.txt"
    path.write_text(CONVAI2)
    return path


def test_turns_of_a_convai2_file_become_tasks(convai2):
    tasks = load_tasks(settings(convai2)).items
    assert [task.answers for task in tasks] == [("hi , who are you ?",), ("i have a dog .",), ("hi",), ("la la la .",)]
    assert tasks[0].inputs == {"persona": ["i like tea .", "i have a dog ."], "history": []}
    assert tasks[2].inputs["history"] == ["hi , who are you ?", "i am tall . and you ?", "i have a dog .", "hi"]
    assert tasks[3].inputs == {"persona": ["i sing ."], "history": ["hello"]}
    assert [task.id for task in tasks] == ["valid-4", "valid-5", "valid-6", "valid-8"]


def test_json_lines_bring_their_stories(tmp_path):
    rows = [
        {"persona": ["i sing."], "history": ["hello", "hello"], "reply": "la", "stories": ["She sang.", "He sat."]},
        {"persona": "i sing.", "history": ["why ?"], "reply": "la", "stories": [{"id": "s", "text": "x"}, "She sang."]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = load(settings(path))
    assert detect_kind(str(path)) == "dialogue"
    assert [task.inputs["history"] for task in data.tasks] == [["hello", "hello"], ["why ?"]]
    assert sorted(document.text for document in data.corpus.values()) == ["He sat.", "She sang.", "x"]
    assert "s" in data.corpus
    assert len({task.split for task in data.tasks}) == 1  # equal personas


def lapdog(tmp_path, question, **more):
    path = tmp_path / "lapdog.jsonl"
    path.write_text(json.dumps({"question": question, "answers": ["fine"], **more}))
    assert detect_kind(str(path)) == "dialogue"
    [task] = load_tasks(settings(path)).items
    return task


@pytest.mark.parametrize(
    ("question", "persona", "history"),
    [
        (
            "persona: i read. i'm a stunt double. context:  Q: hello ?  R: hi : ) Q: at 10:30 ?",
            ["i read.", "i'm a stunt double."],
            ["hello ?", "hi : )", "at 10:30 ?"],
        ),
        ("persona: i sing. context: R: b Q: c R: d", ["i sing."], ["b", "c", "d"]),  # as in LAPDOG's files
        ("context: Q: hi", [], ["hi"]),
        ("persona: i sing. context: Q: __SILENCE__", ["i sing."], []),
    ],
)
def test_a_lapdog_line_is_parted(tmp_path, question, persona, history):
    task = lapdog(tmp_path, question, answers=[" yo ", "hey"], id="a", split="valid")
    assert task.inputs == {"persona": persona, "history": history}
    assert (task.answers, task.id, task.split) == (("yo", "hey"), "a", "dev")


@pytest.mark.parametrize(("name", "form"), [("id", "{}"), ("_id", "\ufeff{}"), ("doc_id", "[{}]")])
def test_stories_may_have_any_id_field(convai2, tmp_path, name, form):
    corpus = tmp_path / "story.jsonl"
    corpus.write_text(form.format(json.dumps({name: "s1", "title": "Beach", "text": "I walked."})))
    data = load(settings(convai2, corpus=str(corpus)))
    assert data.corpus["s1"].title == "Beach"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "persona: i sing. context: hello", "answers": ["a"]}\n', ":1: field 'question' is"),
        ('{"question": "context: Q: a Q: b", "answers": ["a"]}\n', ":1: Q: and R: do not alternate in 'Q: a Q: b'"),
        ('{"question": "context: Q: a", "answers": []}\n', ":1: field 'answers' has no reply"),
        ("your persona: i sing .\n", ":1: .*not a ConvAI2 line"),
        ("1 your persona: i sing .\n2 hello\n", ":2: .*has no reply"),
        ('{"persona": ["a"], "history": [3], "reply": "la"}\n', "'history' is '\\[3\\]'"),
        ('{"persona": ["a"], "history": ["b"]}\n', "'reply' is missing"),
        ('{"persona": ["a"], "history": ["b"], "reply": "c", "split": "x"}\n', "'split' is 'x'"),
    ],
)
def test_a_broken_line_is_reported_with_its_place(tmp_path, text, says):
    path = tmp_path / "broken.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        load_tasks(settings(path))
