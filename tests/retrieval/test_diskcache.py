"""The cache of answers: shared, bounded, and never the reason that a search fails."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from leret.config.retriever import AnswersSettings
from leret.core.errors import RetrievalError
from leret.core.files import cache_directory as default_directory
from leret.core.types import Passage, Ranking
from leret.retrieval.base import PartialResultsError, Retriever
from leret.retrieval.caching import Kept, keep_answers
from leret.retrieval.diskcache import DiskCache

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


def test_what_was_asked_before_is_not_asked_again_by_any_run(tmp_path: Path) -> None:
    first, second = Engine(), Engine()
    kept = Kept(first, DiskCache(tmp_path))
    want = kept.search([*ODD, ODD[1]], 2)
    kept.close()
    again = Kept(second, DiskCache(tmp_path))
    assert again.search([*ODD, ODD[1]], 2) == want == [ranking(query) for query in [*ODD, ODD[1]]]
    assert first.asked == ODD
    assert second.asked == []
    assert isinstance(again, Retriever)


def test_another_index_another_k_and_another_query_are_other_answers(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    one, other = Engine("e1"), Engine("e2")
    Kept(one, cache).search(["a"], 2)
    Kept(one, cache).search(["a"], 3)
    Kept(one, cache).search(["a "], 2)
    Kept(other, cache).search(["a"], 2)
    assert one.asked == ["a", "a", "a "]
    assert other.asked == ["a"]


def test_a_failure_is_raised_and_the_rest_of_its_batch_is_kept(tmp_path: Path) -> None:
    engine = Engine()
    engine.bad = {"b"}
    kept = Kept(engine, DiskCache(tmp_path))
    kept.search(["z"], 2)
    with pytest.raises(PartialResultsError, match="down") as caught:
        kept.search(["a", "b", "z"], 2)
    assert set(caught.value.answered) == {"a", "z"}
    assert caught.value.exit_code == 1
    engine.bad, engine.asked = set(), []
    kept.search(["a", "b"], 2)
    assert engine.asked == ["b"]


def test_the_size_is_bounded_and_what_was_unused_for_longest_goes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=20_000)
    incompressible = {f"q{i}": (Passage("d", "", os.urandom(500).hex(), 1.0),) for i in range(60)}
    cache.put("e", {"old": incompressible["q0"]}, 1)
    for i, (query, found) in enumerate(incompressible.items()):
        cache.put("e", {query: found}, 1)
        if i % 5 == 0:
            assert cache.get("e", ["old"], 1)  # used again and again
            cache.close()  # which writes the uses down
    kept = cache.get("e", list(incompressible), 1)
    assert cache.get("e", ["old"], 1)
    assert "q59" in kept
    assert "q1" not in kept
    with sqlite3.connect(cache.path) as connection:
        total, told = connection.execute("SELECT sum(size), (SELECT bytes FROM total) FROM answers").fetchone()
    assert total == told <= 20_000


def test_the_bound_is_of_the_file_and_may_be_lowered(tmp_path: Path) -> None:
    for bound in (600_000, 300_000):
        cache = DiskCache(tmp_path, max_bytes=bound)
        for start in range(0, 4000, 100):
            few = {f"{bound} {i}": (Passage(f"d{i}", "", "", 1.0),) for i in range(start, start + 100)}
            cache.put("e", few, 1)
        cache.close()
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert bound / 2 < sum(sizes) < bound


def test_an_answer_larger_than_the_cache_is_still_given(tmp_path: Path) -> None:
    kept = Kept(Engine(), DiskCache(tmp_path, max_bytes=10))
    assert kept.search(["a"], 2) == [ranking("a")]
    assert kept.search(["a"], 2) == [ranking("a")]


@pytest.mark.parametrize(
    "damage", [b"this is no database at all, not one bit of it" * 99, b"SQLite format 3\x00" + b"\xff" * 9000]
)
def test_a_damaged_file_is_set_aside_with_a_word(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    path = DiskCache(tmp_path).path
    path.write_bytes(damage)
    kept = Kept(engine, DiskCache(tmp_path))
    assert kept.search(["a"], 2) == [ranking("a")]
    kept.search(["b"], 2)
    engine.asked = []
    assert kept.search(["b"], 2) == [ranking("b")]
    assert engine.asked == []
    assert "damaged" in caplog.text
    assert [p.read_bytes() for p in tmp_path.glob("*.damaged-*")] == [damage]


def flipped(value: bytes) -> bytes:
    return value[:-6] + bytes([value[-6] ^ 0xFF]) + value[-5:]


def immense(value: bytes) -> bytes:
    """A frame that says it holds 64 TB."""
    return value[:4] + b"\xe0" + (1 << 46).to_bytes(8, "little") + value[5:]


@pytest.mark.parametrize("damage", [flipped, immense])
def test_a_damaged_answer_is_asked_for_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept = Kept(Engine(), DiskCache(tmp_path))
    kept.search(["a"], 2)
    kept.close()
    with sqlite3.connect(kept.cache.path) as connection:
        value = connection.execute("SELECT value FROM answers").fetchone()[0]
        connection.execute("UPDATE answers SET value = ?", (damage(value),))
    engine = Engine()
    again = Kept(engine, DiskCache(tmp_path))
    assert again.search(["a"], 2) == [ranking("a")]
    assert again.search(["a"], 2) == [ranking("a")]
    assert engine.asked == ["a"]


def test_a_place_that_cannot_be_written_costs_the_cache_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    kept = Kept(Engine(), DiskCache(tmp_path / "file"))
    assert kept.search(["a"], 2) == kept.search(["a"], 2) == [ranking("a")]
    assert caplog.text.count("cannot be used") == 1


def test_threads_share_it(tmp_path: Path) -> None:
    kept = Kept(Engine(), DiskCache(tmp_path, max_bytes=5_000))
    queries = [f"q{i % 37}" for i in range(300)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda query: kept.search([query], 2)[0], queries))
    assert found == [ranking(query) for query in queries]


def test_all_that_begin_at_once_keep_their_first_answers(tmp_path: Path) -> None:
    names = "abcdef"
    for turn in range(20):
        together = threading.Barrier(len(names))

        def begin(name: str, turn: int = turn, together: threading.Barrier = together) -> None:
            cache = DiskCache(tmp_path / str(turn))
            together.wait()
            cache.put("e", {name: ranking(name)}, 1)
            cache.close()

        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(begin, names))
        assert DiskCache(tmp_path / str(turn)).get("e", names, 1) == {name: ranking(name) for name in names}


WRITER = """
import sys
from pathlib import Path
from leret.retrieval.diskcache import DiskCache
from leret.types import Passage
cache = DiskCache(Path(sys.argv[1]), max_bytes=50_000_000)  # so much that nothing has to go
i = 0
while True:
    cache.put("e", {f"{sys.argv[2]}-{i}": (Passage("d", "", "x" * 50, float(i)),)}, 1)
    if i == 0:
        print("begun", flush=True)
    i += 1
"""


def test_processes_share_it_and_a_kill_in_the_middle_of_a_write_harms_nothing(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], stdout=subprocess.PIPE) for name in "ab"
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
        cache = DiskCache(tmp_path)
        time.sleep(0.5)
        assert len(cache.get("e", ["a-0", "b-0"], 1)) == 2
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    with sqlite3.connect(cache.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        total, told = connection.execute("SELECT sum(size), (SELECT bytes FROM total) FROM answers").fetchone()
    assert total == told
    assert not list(tmp_path.glob("*.damaged-*"))
    cache.put("e", {"after": ranking("a")}, 1)
    assert cache.get("e", ["after"], 1) == {"after": ranking("a")}


def test_engines_that_are_faster_than_the_cache_do_without(tmp_path: Path) -> None:
    engine = Engine()
    assert keep_answers(engine, "bm25", AnswersSettings(path=str(tmp_path))) is engine
    assert isinstance(keep_answers(engine, "bm25", AnswersSettings(use="on", path=str(tmp_path))), Kept)
    assert isinstance(keep_answers(engine, "remote", AnswersSettings(path=str(tmp_path))), Kept)
    assert keep_answers(engine, "remote", AnswersSettings(use="off")) is engine


def test_the_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LERET_CACHE_DIR", "/a")
    assert default_directory() == Path("/a")
    monkeypatch.delenv("LERET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_directory() == Path("/b/leret")
