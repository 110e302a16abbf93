import pytest

from leret.core.errors import DataError
from tests.datasets.writing import DOCUMENTS, HOTPOT, QUESTIONS, json_lines, load, load_tasks

datasets = pytest.importorskip("datasets")


def test_kinds_also_read_the_format_of_leret(tmp_path):
    corpus, questions = json_lines(tmp_path / "c", DOCUMENTS), json_lines(tmp_path / "q", QUESTIONS)
    for kind in ("hotpotqa", "hover", "musique", "2wiki"):
        assert load(kind, questions, corpus).tasks.items == load("jsonl", questions, corpus).tasks.items


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_splits_of_the_hub_are_used(hub):
    json_lines(hub / "train.jsonl", HOTPOT[:1])
    json_lines(hub / "validation.jsonl", HOTPOT[1:])
    data = load("hotpotqa", f"hf:{hub}")
    assert {question.id: question.split for question in data.tasks} == {"5a": "train", "5b": "dev"}
    assert list(data.corpus) == ["Ada", "Byron", "Café"]
    assert [question.id for question in load_tasks("hotpotqa", f"hf:{hub}@validation")] == ["5b"]
    with pytest.raises(DataError, match="no split 'test'; available: train, validation"):
        load_tasks("hotpotqa", f"hf:{hub}@test")


def test_columns_of_the_hub_are_mapped_and_a_question_of_two_splits_is_merged(hub):
    json_lines(hub / "train.jsonl", [{"nr": 1, "q": "Who?", "gold": ["A"]}, {"nr": 2, "q": "Why?", "gold": ["B"]}])
    json_lines(hub / "test.jsonl", [{"nr": 3, "q": "Who?", "gold": ["B"]}])
    fields = {"id": "nr", "question": "q", "relevant_doc_ids": "gold"}
    tasks = load_tasks("jsonl", f"hf:{hub}", fields=fields, merge_questions=True)
    assert [(task.id, task.gold, task.split) for task in tasks] == [("1", ("A", "B"), "test"), ("2", ("B",), "train")]
    with pytest.raises(DataError, match="no column 'query'; the columns are 'q', "):
        load_tasks("jsonl", f"hf:{hub}", fields={**fields, "question": "query"})


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nwith details")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    told = r"hf:a/b: cannot be loaded from the Hugging Face Hub \(Couldn't reach 'a/b' on the Hub\).*download"
    with pytest.raises(DataError, match=told):
        load_tasks("hotpotqa", "hf:a/b")
