"""`leret search`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from tests.retrieval.serving import Echo, running

CAT = "The cat sat on the mat."
CORPUS = Corpus(
    [
        Document("d1", "Cat", CAT),
        Document("d2", "Dog", "A dog \x1b[31mbarks\x07 at the postman."),
        Document("d3", "Bird [bold]", "far away " * 100 + "the bird sings of a cat."),
    ]
)


def leret(*args: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("search") / "idx"
    BM25.build(CORPUS, directory)
    return directory


def test_search_shows_a_table(index: Path) -> None:
    code, out, _ = leret("search", index, "cat", "-k", "5")
    assert code == 0
    assert "Cat (d1)" in out
    assert "Bird [bold] (d3)" in out
    assert "…" in out  # the text is shown from where the word stands
    assert "sings of a cat." in out


def test_no_text_is_a_command_of_the_terminal(index: Path) -> None:
    code, out, _ = leret("search", index, "dog")
    assert code == 0
    assert "\x1b[31m" not in out
    assert "\x07" not in out


def test_json_is_whole(index: Path) -> None:
    found = json.loads(leret("search", index, "cat \ud800", "--json", "-k", "1")[1])
    assert found["ranking"][0] == {
        "rank": 1, "doc_id": "d1", "title": "Cat", "text": CAT, "score": found["ranking"][0]["score"],
    }  # fmt: skip


def test_a_server_is_searched_by_its_url() -> None:
    with running(Echo()) as server:
        code, out, err = leret("search", server.url, "cat", "-k", "2", "--json")
    assert code == 0, err
    assert [found["doc_id"] for found in json.loads(out)["ranking"]] == ["cat#0", "cat#1"]
