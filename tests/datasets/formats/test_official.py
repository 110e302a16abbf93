import pytest

from leret.core.errors import DataError
from leret.core.types import Task
from tests.datasets.writing import DOCUMENTS, HOTPOT, HOVER, MUSIQUE, QUESTIONS, array, json_lines, load, load_tasks


def test_gold_and_corpus_of_hotpotqa_and_2wiki_come_from_titles(tmp_path):
    data = load("hotpotqa", array(tmp_path / "h.json", HOTPOT))
    assert data.tasks.items[0] == Task.question("5a", "Whose father was a poet?", "Ada", ("Ada", "Byron"), "bridge", 2)
    assert list(data.corpus) == ["Ada", "Byron", "Café"]
    assert data.corpus["Ada"].text == "Ada wrote. She was Byron's."
    record = {**HOTPOT[0], "type": "bridge_comparison", "supporting_facts": [["Ada", 0], ["Byron", 0], ["Café", 0]]}
    [task] = load("2wiki", array(tmp_path / "w", [record])).tasks
    assert (task.type, task.hops, task.gold) == ("bridge_comparison", 3, ("Ada", "Byron", "Café"))


def test_hotpotqa_as_the_hub_tables_hold_it(tmp_path):
    def columns(pairs, *names):
        return {name: [pair[i] for pair in pairs] for i, name in enumerate(names)}

    rows = [
        {
            **{name.removeprefix("_"): value for name, value in record.items()},
            "supporting_facts": columns(record["supporting_facts"], "title", "sent_id"),
            "context": columns(record["context"], "title", "sentences"),
        }
        for record in HOTPOT
    ]
    official = load("hotpotqa", array(tmp_path / "h", HOTPOT))
    table = load("hotpotqa", json_lines(tmp_path / "t", rows))
    assert (table.tasks.items, table.corpus.digest) == (official.tasks.items, official.corpus.digest)


def test_hotpotqa_over_an_abstracts_file(tmp_path):
    articles = [{"id": "12", "url": "u", "title": d["title"], "text": [d["text"], " More."]} for d in DOCUMENTS]
    data = load("hotpotqa", array(tmp_path / "h", HOTPOT), json_lines(tmp_path / "wiki", articles))
    assert data.corpus["Byron"].text == "Byron was a poet. More."


def test_hover_claims_over_hotpotqa_documents(tmp_path):
    claims = array(tmp_path / "v", HOVER)
    (task,) = load("hover", claims, array(tmp_path / "h", HOTPOT)).tasks
    assert task == Task.question("u1", "Ada was Byron's.", "SUPPORTED", ("Ada", "Byron"), "SUPPORTED", 2)
    row = {**HOVER[0], "label": 1, "supporting_facts": [{"key": "Ada", "value": 0}, {"key": "Byron", "value": 0}]}
    (task,) = load_tasks("hover", json_lines(tmp_path / "hub", [row]))
    assert task.gold == ("Ada", "Byron")
    with pytest.raises(DataError, match=r"set data\.corpus to HotpotQA's corpus"):
        load("hover", claims, claims)


def test_musique_paragraphs_of_one_title_are_two_documents(tmp_path):
    data = load("musique", json_lines(tmp_path / "m", [{**MUSIQUE[0], "answer_aliases": ["Anne Isabella"]}]))
    (task,) = data.tasks
    assert (task.hops, task.type, len(data.corpus)) == (2, "2hop", 3)
    assert task.answers == ("Annabella", "Anne Isabella")
    assert [data.corpus[doc_id].text for doc_id in task.gold] == ["Ada was a programmer.", "The mother of Ada."]
    assert [document.title for document in data.corpus.values()] == ["Ada", "Ada", "Annabella"]


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
