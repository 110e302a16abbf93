import json

import pytest

from leret.config.data import DataSettings
from leret.datasets.load import load_tasks
from tests.datasets.writing import json_lines
from tests.first_steps import leret, refused, succeeds

FILES = ["--questions", "questions.jsonl", "--corpus", "corpus.jsonl"]
SAMPLE = ["sample", "demo", "--run", "r", "--set",
          "data={questions: questions.jsonl, corpus: corpus.jsonl, kind: jsonl, split: all}"]  # fmt: skip
UNKNOWN_GOLD = '{"id": "a", "question": "Who?", "relevant_doc_ids": ["Z"]}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"qid": "a", "query": "?", "labels": ["A"]}\n', "no 'relevant_doc_ids', 'answer'"),
     ("id,question\n1,Who?\n", "broken JSON"),
     ('{"what": 1}\n', "field 'question' or 'query' is missing; the fields are 'what'"),
     (UNKNOWN_GOLD, "gold document 'Z' of question 'a' is not in")],
)  # fmt: skip
def test_bad_files_get_the_words_of_sample_from_every_command(folder, text, says):
    (folder / "questions.jsonl").write_text(text)
    for command in (["init", *FILES], ["data", "inspect", *FILES], [*SAMPLE, "--dry-run"], SAMPLE):
        assert says in refused(*command), command


def test_inspect_tells_one_bad_record_among_good_ones(folder):
    with (folder / "questions.jsonl").open("a") as file:
        file.write(UNKNOWN_GOLD)
    code, out = leret("data", "inspect", *FILES)
    assert (code, "unknown gold: 1" in out, "jsonl:21: gold document 'Z'" in out) == (2, True, True), out
    for command, key in ((["data", "inspect", *FILES], "n_questions"), ([*SAMPLE, "--dry-run"], "questions")):
        code, out = leret(*command, "--set", "data.skip_invalid=true", "--json")
        assert (code, json.loads(out.splitlines()[-1])[key]) == (0, 20)  # after a warning of the policy
    assert "--questions" in refused("data", "inspect", "questions.jsonl")


def test_candidates_of_a_corpus_are_the_gold_documents_and_the_first_others(folder):
    corpus = [{"doc_id": f"d{i}", "title": "T", "text": f"milk {i} " + "sea " * i} for i in range(8)]
    json_lines(folder / "corpus.jsonl", corpus)
    asked = {"id": "q", "question": "milk?", "answer": "x", "relevant_doc_ids": ["d7"]}
    json_lines(folder / "questions.jsonl", [asked])
    succeeds("data", "episodes", *FILES, "--out", "e.jsonl", "--candidates", "4")
    [task] = load_tasks(DataSettings.model_validate({"kind": "chunks", "questions": "e.jsonl", "split": "all"}))
    assert sorted(chunk["id"] for chunk in task.inputs["chunks"]) == ["d0", "d1", "d2", "d7"]
    assert (task.gold, task.answers) == (("d7",), ("x",))
    inspected = json.loads(succeeds("data", "inspect", "--questions", "e.jsonl", "--json"))
    assert list(inspected["inputs"]) == ["question, chunks"]  # the first line shows the kind
