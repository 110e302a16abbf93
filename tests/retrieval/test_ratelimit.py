"""Requests a second."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from leret.core.files import cache_directory as default_directory
from leret.retrieval.clients.ratelimit import RateLimit, StartFile, shared_limit

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_start_apart_and_a_late_waker_takes_no_ones_place() -> None:
    clock = Clock()
    limit = RateLimit(2.0, clock)
    assert limit.wait_s() == 0
    assert limit.wait_s() == 0.5
    clock.now = 100.7  # woke up late, and starts now
    assert limit.wait_s() == 0
    clock.now = 101.0
    assert round(limit.wait_s(), 6) == 0.2


def test_a_pause_holds_for_all() -> None:
    clock = Clock()
    limit = RateLimit(2.0, clock)
    limit.pause(3)
    assert limit.wait_s() == 3


def test_one_limit_a_server_and_the_lowest_rate_holds() -> None:
    a = shared_limit("http://test-host/a", 10.0)
    b = shared_limit("http://test-host/b", 3.0)
    assert a is b
    assert shared_limit("http://test-host", 10.0).per_s == 3.0
    assert shared_limit("http://test-host", 10.0, "s3cr3tk3y") is not a
    assert shared_limit("http://another-host", 10.0) is not a


def test_the_key_is_in_no_name_of_a_file() -> None:
    shared_limit("http://yet-another-host", 10.0, "s3cr3tk3y").wait_s()
    assert [path.name[:9] for path in default_directory().iterdir()] == ["requests-"]
    assert "s3cr3tk3y" not in str(list(default_directory().iterdir()))


STARTS = """
import sys, time
from leret.retrieval.ratelimit import shared_limit
limit = shared_limit("http://test-host", 20.0)
for _ in range(10):
    while (wait_s := limit.wait_s()) > 0:
        time.sleep(wait_s)
    print(time.time(), flush=True)
"""


def test_processes_keep_the_rate_together() -> None:
    command = [sys.executable, "-c", STARTS]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    starts = sorted(float(line) for process in asking for line in process.communicate(timeout=60)[0].splitlines())
    assert len(starts) == 30
    assert starts[-1] - starts[0] >= 29 / 20 * 0.95
    assert all(sum(start <= other < start + 0.5 for other in starts) <= 12 for start in starts)


def test_a_pause_holds_for_other_processes(tmp_path: Path) -> None:
    one, other = (RateLimit(1000.0, file=StartFile(tmp_path / "f")) for _ in range(2))
    one.pause(3)
    assert 2.5 < other.wait_s() <= 3
    one.pause(1)
    assert 2.5 < other.wait_s() <= 3


def test_nobody_waits_for_the_lock(tmp_path: Path) -> None:
    file = StartFile(tmp_path / "f")
    with file._locked():
        assert 0 < StartFile(tmp_path / "f").claim(1.0) < 0.05
        file.pause(60)
    assert file.claim(1.0) == 0


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 8, struct.pack("<d", 1e18), struct.pack("<d", math.inf), struct.pack("<d", 5e3)]
)
def test_a_damaged_file_or_a_clock_that_was_set_back_holds_nobody(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    file = StartFile(tmp_path / "f", Clock())
    assert file.claim(0.5) == 0
    assert file.claim(0.5) == 0.5


def test_a_directory_that_cannot_be_written_leaves_the_rate_to_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no-directory").write_text("")
    limit = RateLimit(2.0, Clock(), StartFile(tmp_path / "no-directory" / "f"))
    assert [limit.wait_s(), limit.wait_s()] == [0, 0.5]
    limit.pause(3)
    assert limit.wait_s() == 3
    assert caplog.text.count("by this process alone") == 1
