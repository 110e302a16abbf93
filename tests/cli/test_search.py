"""`leret search`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from tests.cli.test_app import leret
from tests.retrieval.serving import Echo, running

CAT = "The cat sat on the mat."
CORPUS = Corpus(
    [
        Document("d1", "Cat", CAT),
        Document("d2", "Dog", "A dog \x1b[31mbarks\x07 at the postman."),
        Document("d3", "Bird [bold]", "far away " * 100 + "the bird sings of a cat."),
    ]
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("search") / "idx"
    BM25.build(CORPUS, directory)
    return directory


def test_a_text_is_shown_from_its_first_word_of_the_query(index: Path) -> None:
    code, out = leret("search", index, "cat", "-k", "5")
    assert code == 0
    for shown in ("Cat (d1)", "Bird [bold] (d3)", "…", "sings of a cat."):
        assert shown in out


def test_no_text_is_a_command_of_the_terminal(index: Path) -> None:
    out = leret("search", index, "dog")[1]
    assert ("barks" in out, "\x1b[31m" in out, "\x07" in out) == (True, False, False)


def test_json_is_whole(index: Path) -> None:
    (found,) = json.loads(leret("search", index, "cat \ud800", "--json", "-k", "1")[1])["ranking"]
    assert found.pop("score") > 0
    assert found == {"rank": 1, "doc_id": "d1", "title": "Cat", "text": CAT}


def test_a_server_is_searched_by_its_url() -> None:
    with running(Echo()) as server:
        code, out = leret("search", server.url, "cat", "-k", "2", "--json")
    assert code == 0, out
    assert [found["doc_id"] for found in json.loads(out)["ranking"]] == ["cat#0", "cat#1"]
