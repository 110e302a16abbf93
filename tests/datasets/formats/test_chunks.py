import pytest

from leret.core.errors import DataError
from tests.datasets.writing import HOTPOT, MUSIQUE, QUESTIONS, array, json_lines, load, load_tasks

RECORD = {"id": "q", "question": "Who?", "answer": "Ada", "chunks": ["Byron.", "Ada."], "support": [1]}


def test_chunks_are_named_by_their_ids_or_places(tmp_path):
    chunks = [{"id": "b", "title": "Byron", "text": "A poet."}, {"text": "Ada."}]
    records = [RECORD, {**RECORD, "id": "p", "chunks": chunks, "support": ["b", 1]}]
    texts, objects = load_tasks("chunks", json_lines(tmp_path / "q", records))
    assert texts.inputs == {"question": "Who?", "chunks": ["Byron.", "Ada."]}
    assert (texts.gold, texts.answers) == (("1",), ("Ada",))
    assert objects.inputs["chunks"] == [chunks[0], {"id": "1", "title": "", "text": "Ada."}]
    assert objects.gold == ("b", "1")


@pytest.mark.parametrize(
    ("change", "says"),
    [({"chunks": []}, "a list of texts"), ({"chunks": [3]}, "texts, or of objects"),
     ({"chunks": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, "have the same id"),
     ({"support": [2]}, "from 0 to 1"), ({"support": "1"}, "indices or ids"),
     ({"support": [], "answer": None}, "to score against")],
)  # fmt: skip
def test_bad_records_are_refused(tmp_path, change, says):
    with pytest.raises(DataError, match=says):
        load_tasks("chunks", json_lines(tmp_path / "q", [{**RECORD, **change}]))


@pytest.mark.parametrize(("kind", "records"), [("hotpotqa", HOTPOT), ("musique", MUSIQUE)])
def test_episodes_have_the_paragraphs_of_official_files(tmp_path, kind, records):
    data = load(kind, array(tmp_path / "o", records) if kind == "hotpotqa" else json_lines(tmp_path / "o", records))
    for task, episode in zip(data.tasks, load_tasks("episodes", str(tmp_path / "o")), strict=True):
        assert (episode.id, episode.gold, episode.answers) == (task.id, task.gold, task.answers)
        assert episode.inputs["question"] == task.text
        assert {chunk["id"]: chunk["text"] for chunk in episode.inputs["chunks"]}.items() <= {
            document.doc_id: document.text for document in data.corpus.values()
        }.items()
    with pytest.raises(DataError, match="leret data episodes"):
        load_tasks("episodes", json_lines(tmp_path / "q", QUESTIONS))
