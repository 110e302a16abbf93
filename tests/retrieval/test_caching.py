"""The cache of rankings: shared, bounded, and never the reason that a search fails."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from leret.config.retriever import BM25Settings, CacheSettings, RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Passage, Ranking
from leret.retrieval.base import PartialResultsError, Retriever
from leret.retrieval.caching import CachedRetriever, with_cache

ODD = ["", "a\x00b", "\ud800", "x" * 100_000, "é", "e\u0301", "SELECT '", "a\nb"]


def ranking(query: str, n: int = 2) -> Ranking:
    return tuple(Passage(f"{query[:20]}{i}", "T\ud800", "text é", 1 / (i + 3)) for i in range(n))


class Engine:
    """Answers a query with itself, and counts."""

    def __init__(self, digest: str = "e1") -> None:
        self.digest = digest
        self.asked: list[str] = []
        self.bad: set[str] = set()

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        self.asked += queries
        if self.bad & set(queries):
            good = {query: ranking(query, k) for query in queries if query not in self.bad}
            raise PartialResultsError(RetrievalError("down").failed(), good)
        return [ranking(query, k) for query in queries]


def test_no_run_asks_again_what_another_has_asked(tmp_path: Path) -> None:
    first, second = Engine(), Engine()
    cached = CachedRetriever(first, tmp_path)
    want = cached.search([*ODD, ODD[1]], 2)
    cached.close()
    again = CachedRetriever(second, tmp_path)
    assert again.search([*ODD, ODD[1]], 2) == want == [ranking(query) for query in [*ODD, ODD[1]]]
    assert (first.asked, second.asked) == (ODD, [])
    assert isinstance(again, Retriever)


def test_index_k_and_query_name_a_ranking(tmp_path: Path) -> None:
    one, other = Engine("e1"), Engine("e2")
    for engine, query, k in ((one, "a", 2), (one, "a", 3), (one, "a ", 2), (other, "a", 2)):
        CachedRetriever(engine, tmp_path).search([query], k)
    assert (one.asked, other.asked) == (["a", "a", "a "], ["a"])


def test_a_failure_is_raised_and_the_rest_of_its_batch_is_kept(tmp_path: Path) -> None:
    engine = Engine()
    engine.bad = {"b"}
    cached = CachedRetriever(engine, tmp_path)
    cached.search(["z"], 2)
    with pytest.raises(PartialResultsError, match="down") as caught:
        cached.search(["a", "b", "z"], 2)
    assert set(caught.value.answered) == {"a", "z"}
    assert caught.value.exit_code == 1
    engine.bad, engine.asked = set(), []
    cached.search(["a", "b"], 2)
    assert engine.asked == ["b"]


def test_the_size_is_bounded_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    class Incompressible(Engine):
        def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
            self.asked += queries
            return [(Passage(query, "", os.urandom(4000).hex(), 1.0),) for query in queries]

    engine = Incompressible()
    cached = CachedRetriever(engine, tmp_path, max_bytes=400_000)
    for i in range(300):
        cached.search([f"q{i}"], 1)
        cached.search(["old"], 1)
    assert engine.asked.count("old") == 1
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.suffix != ".db-wal") < 800_000
    cached.search(["q299"], 1)
    cached.search(["q0"], 1)
    assert (engine.asked.count("q299"), engine.asked.count("q0")) == (1, 2)


def damage_database(directory: Path) -> None:
    (directory / "cache.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 9000)


def damage_value(directory: Path) -> None:
    with sqlite3.connect(directory / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = ?", (b"\x78\x9c no",))


def plant_pickle(directory: Path) -> None:
    with sqlite3.connect(directory / "cache.db") as connection:
        connection.execute("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps([["planted", "", "", 1.0]]),))


@pytest.mark.parametrize("harm", [damage_database, damage_value, plant_pickle])
def test_a_damaged_cache_costs_no_ranking_and_loads_no_pickle(
    tmp_path: Path, harm: object, caplog: pytest.LogCaptureFixture
) -> None:
    before = CachedRetriever(Engine(), tmp_path)
    before.search(["a"], 2)
    before.close()
    harm(tmp_path)  # type: ignore[operator]
    cached = CachedRetriever(Engine(), tmp_path)
    assert cached.search(["a"], 2) == cached.search(["a"], 2) == [ranking("a")]
    assert caplog.text.count("cannot be used") == 1


def test_a_directory_that_cannot_be_written_costs_no_ranking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    cached = CachedRetriever(Engine(), tmp_path / "file")
    assert cached.search(["a"], 2) == cached.search(["a"], 2) == [ranking("a")]
    assert caplog.text.count("cannot be used") == 1


def test_threads_share_it(tmp_path: Path) -> None:
    cached = CachedRetriever(Engine(), tmp_path)
    queries = [f"q{i % 37}" for i in range(150)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda query: cached.search([query], 2)[0], queries))
    assert found == [ranking(query) for query in queries]


WRITER = """
import sys
from pathlib import Path
from tests.retrieval.test_caching import CachedRetriever, Engine
cached, i = CachedRetriever(Engine(), Path(sys.argv[1])), 0
while True:
    cached.search([f"{sys.argv[2]}-{i}"], 1)
    if i == 0:
        print("begun", flush=True)
    i += 1
"""


def test_processes_share_it_and_a_kill_in_a_write_harms_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, env=environment) for name in "ab"]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    engine = Engine()
    assert CachedRetriever(engine, tmp_path).search(["a-0", "b-0"], 1) == [ranking("a-0", 1), ranking("b-0", 1)]
    assert engine.asked == []


def test_engines_that_are_faster_than_the_cache_do_without(tmp_path: Path) -> None:
    engine = Engine()
    at = str(tmp_path)
    remote = RemoteSettings(urls=("http://h",), cache=CacheSettings(path=at))
    assert with_cache(engine, BM25Settings(cache=CacheSettings(path=at))) is engine
    assert isinstance(with_cache(engine, BM25Settings(cache=CacheSettings(use="on", path=at))), CachedRetriever)
    assert isinstance(with_cache(engine, remote), CachedRetriever)
    assert with_cache(engine, remote.model_copy(update={"cache": CacheSettings(use="off")})) is engine
