import pytest

from leret.core.errors import DataError
from leret.core.types import Task
from tests.datasets.writing import DOCUMENTS, HOTPOT, HOVER, MUSIQUE, array, json_lines, load, load_tasks


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
