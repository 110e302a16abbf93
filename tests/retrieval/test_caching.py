import sqlite3

import pytest

from leret.config.retriever import RetrieverSettings
from leret.core.errors import RetrievalError
from leret.core.types import Passage
from leret.retrieval.base import PartialResultsError, Retriever
from leret.retrieval.caching import CachedRetriever, with_cache
from leret.retrieval.clients.remote import Remote

ODD = ["", "a\x00b", "\ud800", "x" * 100_000, "é", "e\u0301", "SELECT '", "a\nb"]


def ranking(query, n=2):
    return tuple(Passage(f"{query[:20]}{i}", "T\ud800", "text é", 1 / (i + 3), "parent") for i in range(n))


class Engine:
    def __init__(self, digest="e1"):
        self.digest = digest
        self.asked = []
        self.bad = set()

    def search(self, queries, k):
        self.asked += queries
        good = {query: ranking(query, k) for query in queries if query not in self.bad}
        if self.bad & set(queries):
            raise PartialResultsError(RetrievalError("down").failed(), good)
        return [good[query] for query in queries]


def test_runs_share_cached_rankings_of_one_index_k_and_query(tmp_path):
    first, second = Engine(), Engine()
    cached = CachedRetriever(first, tmp_path)
    want = cached.search([*ODD, ODD[1]], 2)
    cached.close()
    again = CachedRetriever(second, tmp_path)
    assert again.search([*ODD, ODD[1]], 2) == want == [ranking(query) for query in [*ODD, ODD[1]]]
    assert (first.asked, second.asked) == (ODD, [])
    assert isinstance(again, Retriever)
    for engine, query, k in ((first, "é", 3), (first, "é ", 2), (Engine("e2"), "é", 2)):
        engine.asked = []
        CachedRetriever(engine, tmp_path).search([query], k)
        assert engine.asked == [query]


def test_a_partial_failure_caches_the_answered_queries(tmp_path):
    engine = Engine()
    engine.bad = {"b"}
    cached = CachedRetriever(engine, tmp_path)
    cached.search(["z"], 2)
    with pytest.raises(PartialResultsError, match="down") as caught:
        cached.search(["a", "b", "z"], 2)
    assert (set(caught.value.answered), caught.value.exit_code) == ({"a", "z"}, 1)
    engine.bad, engine.asked = set(), []
    cached.search(["a", "b"], 2)
    assert engine.asked == ["b"]


def damage_file(directory):
    (directory / "cache.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 9000)


def plant_pickle(directory):
    evil = b"cos\nmkdir\n(V%s\ntR." % bytes(directory / "loaded")  # os.mkdir("...") when it is loaded
    with sqlite3.connect(directory / "cache.db") as connection:
        connection.execute("UPDATE Cache SET mode = 4, value = ?", (evil,))


def put_a_file_in_its_place(directory):
    directory.rename(directory.with_name("elsewhere"))
    directory.write_text("x")


@pytest.mark.parametrize("harm", [damage_file, plant_pickle, put_a_file_in_its_place])
def test_a_damaged_cache_is_bypassed_and_unpickles_nothing(harm, tmp_path, caplog):
    before = CachedRetriever(Engine(), tmp_path / "cache")
    before.search(["a"], 2)
    before.close()
    harm(tmp_path / "cache")
    cached = CachedRetriever(Engine(), tmp_path / "cache")
    assert cached.search(["a"], 2) == cached.search(["a"], 2) == [ranking("a")]
    assert caplog.text.count("cannot use the cache") == 1
    assert not (tmp_path / "cache" / "loaded").exists()


REMOTE = {"kind": "remote", "urls": ("http://127.0.0.1:9",)}


@pytest.mark.parametrize(
    ("settings", "use", "cached"),
    [
        (REMOTE, "auto", True),
        (REMOTE, "off", False),
        ({**REMOTE, "protocol": "colbert"}, "auto", False),  # its index has no name
        ({**REMOTE, "protocol": "colbert", "name": "wiki"}, "auto", True),
    ],
)
def test_only_slow_retrievers_with_a_named_index_are_cached_by_default(settings, use, cached, tmp_path):
    cache = {"path": str(tmp_path), "use": use}
    read = RetrieverSettings.model_validate({**settings, "cache": cache})
    assert isinstance(with_cache(Remote(read), read), CachedRetriever) is cached
