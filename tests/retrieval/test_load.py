import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.config.retriever import BM25Settings
from leret.core.errors import RetrievalError
from leret.core.files import is_incomplete
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.index.manifest import check_files, read_manifest
from leret.retrieval.load import check_index, load_retriever, open_index
from tests.retrieval.small import ANIMALS, KINDS, settings

LEXICAL = {"bm25", "tantivy"}

SILENT = ["", " ", "\n\t", "?!", "\x00\x1f\x7f", "\ud800", "\ud800\udc00"[::-1], "()", "***", '"', "\\", "-- ++", "{}"]

ODD = [
    "title:cat AND (dog OR",
    "cat^1000 dog~2",
    "/cat.*/ *at c?t",
    "NOT cat",
    "\x00cat\x1b[2J\x7f",
    "cat \ud800 dog",
    "ｃａｔ ﷺ 🐈 \u202ecat",
    "cat " * 20_000,
    "".join(map(chr, range(1, 2000))),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def built(kind, folder):
    load_retriever(settings(kind, folder, index=str(folder / kind)), ANIMALS, folder / "unused")
    return folder / kind


@pytest.fixture(scope="module")
def engine(built):
    return open_index(built)  # alone


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


def test_a_document_ranks_first_for_its_words_also_in_a_moved_index(built, engine, copy):
    document, moved = ANIMALS["bird"], open_index(copy)
    rankings = engine.search([f"{document.title} {document.text}", "coffee and strudel"], 5)
    assert rankings[0][0][:3] == ("bird", document.title, document.text)
    scores = [passage.score for passage in rankings[0]]
    assert scores == sorted(scores, reverse=True)
    assert moved.digest == engine.digest == read_manifest(built).digest == check_index(copy).digest
    assert moved.search([f"{document.title} {document.text}", "coffee and strudel"], 5) == rankings


def test_a_query_without_a_letter_or_digit_has_an_empty_ranking(engine):
    rankings = engine.search([query for silent in SILENT for query in (silent, "cat")], 2)
    assert rankings[::2] == [()] * len(SILENT)
    assert all(rankings[1::2])
    assert engine.search([], 3) == []


def test_any_text_is_a_query_and_never_syntax(kind, engine):
    before, *rankings, after = engine.search(["cat dog", *ODD, "cat dog"], 4)
    assert before == after
    for query, ranking in zip(ODD, rankings, strict=True):
        assert len({passage.doc_id for passage in ranking}) == len(ranking) <= 4, query[:20]
        if kind in LEXICAL and "cat" in query.replace("/cat.*/", "") and len(query) < 100:
            # a minus, a NOT or a field name does not shut the document out
            assert "cat" in [passage.doc_id for passage in ranking], query[:20]


def test_k_is_at_least_one_and_may_exceed_the_corpus(kind, engine):
    for k in (0, -1):
        with pytest.raises(RetrievalError, match=f"k is {k}; "):
            engine.search(["cat"], k)
    (ranking,) = engine.search(["a town by the river"], 10**6)
    assert len(ranking) == (60 if kind in LEXICAL else len(ANIMALS))


def test_batches_threads_and_smaller_k_agree(engine):
    queries = [f"town {i} river" for i in range(12)] + ["cat", "the dog barks at a postman and a cat on a mat"]
    with ThreadPoolExecutor(4) as pool:
        alone = [passage[0] for passage in pool.map(lambda query: engine.search([query], 8), queries)]
    batch, shorter = engine.search(queries, 8), engine.search(queries, 3)

    def ids(rankings, k=8):
        return [[passage.doc_id for passage in ranking[:k]] for ranking in rankings]

    assert ids(batch) == ids(alone)
    assert ids(batch, 3) == ids(shorter)
    for ranking, single in zip(batch, alone, strict=True):
        assert [passage.score for passage in ranking] == pytest.approx([passage.score for passage in single], rel=1e-5)


def test_a_changed_file_is_detected(kind, copy):
    if kind == "hybrid":  # its files are those of its parts
        copy = copy / "first"
    manifest = read_manifest(copy)
    assert check_files(manifest, copy, content=True) == []
    largest = max(manifest.files, key=lambda name: manifest.files[name][0])
    content = bytearray((copy / largest).read_bytes())
    content[len(content) // 2] ^= 255
    (copy / largest).write_bytes(content)
    assert check_files(manifest, copy, content=True) == [f"{largest} has changed since the build"]
    (copy / largest).write_bytes(content[:10])
    with pytest.raises(RetrievalError, match=r"is broken \(.* has 10 bytes"):
        open_index(copy)


MISMATCHES = [
    ({"documents": 3}, r"lists 3 documents, .* 65|not match the indexes"),
    ({"corpus": "0" * 32}, r"digest|not match the indexes"),
    ({"settings": {"colour": "red"}}, r"settings|not match the indexes"),  # one more
]


def test_a_mismatched_manifest_is_refused(copy):
    for path in copy.rglob("manifest.json"):  # those of the parts of a hybrid too
        before = path.read_text()
        for change, match in MISMATCHES:
            values = json.loads(before)
            values |= {name: values[name] | new if isinstance(new, dict) else new for name, new in change.items()}
            path.write_text(json.dumps(values))
            with pytest.raises(RetrievalError, match=match) as refused:
                open_index(copy)
            assert "build the index again" in str(refused.value)
        path.write_text(before)


def test_a_named_index_of_another_corpus_or_with_other_settings_is_refused(tmp_path):
    named, other = BM25Settings(index=str(tmp_path / "index")), Corpus([Document("cow", "Cow", "A cow eats grass.")])
    load_retriever(named, ANIMALS, tmp_path)
    with pytest.raises(RetrievalError, match=f"is an index of a different corpus.*{ANIMALS.digest}.*{other.digest}"):
        load_retriever(named, other, tmp_path)
    with pytest.raises(RetrievalError, match=r"with different settings \(k1: 1.5 in the index, 1.2 in the recipe\)"):
        load_retriever(named.model_copy(update={"k1": 1.2}), ANIMALS, tmp_path)


def test_other_directories_are_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RetrievalError, match="is not an index"):
        load_retriever(BM25Settings(index=str(tmp_path)), ANIMALS, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


KILLED = """
import os, sys
from pathlib import Path
from leret.config.retriever import RetrieverSettings
from leret.retrieval import load
from leret.retrieval.index import manifest
from tests.retrieval.small import ANIMALS
manifest.write_manifest = load.write_manifest = lambda *_: os.kill(os.getpid(), 9)
load.load_retriever(RetrieverSettings.model_validate_json(sys.argv[1]), ANIMALS, Path("unused"))
"""


def test_a_killed_build_is_detected_and_finished(tmp_path):
    directory = tmp_path / "index"
    wanted = BM25Settings(index=str(directory))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, wanted.model_dump_json()]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert is_incomplete(directory)
    assert not directory.exists()
    with pytest.raises(RetrievalError, match=r"the index is incomplete"):
        open_index(directory)
    load_retriever(wanted, ANIMALS, tmp_path)
    assert open_index(directory).search(["cat"], 1)[0][0].doc_id == "cat"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".building"]
