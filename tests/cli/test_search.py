import json

from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from tests.datasets.writing import json_lines
from tests.first_steps import refused, succeeds

CAT = "The cat sat on the mat."
TEXTS = {"Cat": CAT, "Dog": "A dog \x1b[31mbarks\x07.", "Bird [bold]": "far away " * 100 + "the bird sings of a cat."}


def test_the_start_of_each_text_is_shown(tmp_path):
    index = tmp_path / "idx"
    BM25.build(Corpus(Document(f"d{i}", title, text) for i, (title, text) in enumerate(TEXTS.items(), 1)), index)
    out = succeeds("search", index, "cat dog", "-k", "5")
    shown = ("Cat (d1)", "Bird [bold] (d3)", "far away", "…", "barks")
    assert [text in out for text in (*shown, "sings", "\x1b[31m", "\x07")] == [True] * 5 + [False] * 3, out
    (passage,) = json.loads(succeeds("search", index, "cat \ud800", "--json", "-k", "1"))["ranking"]
    assert passage.pop("score") > 0
    assert passage == {"rank": 1, "doc_id": "d1", "title": "Cat", "text": CAT}


def test_a_retriever_is_measured_by_parents_on_request(tmp_path):
    chunks = (Document(f"d{i}#0", title, text, f"d{i}") for i, (title, text) in enumerate(TEXTS.items(), 1))
    BM25.build(Corpus(chunks), tmp_path / "chunks")
    asked = json_lines(tmp_path / "q.jsonl", [{"id": "q", "question": "cat mat", "relevant_doc_ids": ["d1"]}])
    measure = ["search", tmp_path / "chunks", "--questions", asked, "--measures", "R@1"]
    out = succeeds(*measure, "--set", "data.gold=parent", "--json").splitlines()[-1]
    assert json.loads(out)["measures"] == {"R@1": 1.0}
    assert "set data.gold: parent" in refused(*measure)
    assert "either a query, or a question file" in refused("search", tmp_path / "chunks")
    assert "either a query, or a question file" in refused(*measure, "cat")
    for flags in (["--out", tmp_path / "o"], ["--set", "data.gold=parent"]):
        assert "need --questions" in refused("search", tmp_path / "chunks", "cat", *flags)
    assert "-k 5 needs a query; measures name their own cut-off" in refused(*measure, "-k", "5")
