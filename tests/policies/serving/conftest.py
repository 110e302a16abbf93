"""The fake engine as an executable, and `leret serve policy` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from leret.policies.serving.launch import free_port

FAKE = Path(__file__).with_name("fake_engine.py")


@dataclass
class Serve:
    """`leret serve policy`, and what the fake engine recorded."""

    record: Path
    executable: Path
    port: int
    out: str = ""
    err: str = ""
    process: subprocess.Popen[str] | None = None
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def flags(self) -> list[str]:
        return ["--executable", str(self.executable), "--port", str(self.port)]

    def start(self, *arguments: str | Path, mode: str = "well", **environment: str) -> None:
        command = [sys.executable, "-m", "leret", "serve", "policy", *map(str, arguments)]
        added = {"FAKE_ENGINE": mode, "FAKE_RECORD": str(self.record), "TMPDIR": str(self.record.parent)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=self.environment | added | environment)

    def wait_for(self, text: str) -> None:
        """Read standard output up to a text."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line
            if text in line:
                return
        self.end()
        raise AssertionError(f"no {text!r} in:\n{self.out}\n{self.err}")

    def end(self, stop: signal.Signals | None = None, timeout_s: float = 60) -> int:
        """The exit code."""
        assert self.process is not None
        if stop is not None:
            self.process.send_signal(stop)
        out, err = self.process.communicate(timeout=timeout_s)
        self.out, self.err = self.out + out, self.err + err
        return self.process.returncode

    def recorded(self, name: str, wait_s: float = 30) -> object:
        """A record of the fake, as soon as it is whole."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return json.loads((self.record / name).read_text())
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def requests(self) -> list[dict[str, object]]:
        path = self.record / "requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    executable = tmp_path / "bin" / "engine"
    executable.parent.mkdir()
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    executable.chmod(0o755)
    made = Serve(tmp_path / "record", executable, free_port("127.0.0.1"))
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    pids = made.record / "pids.json"
    for pid in json.loads(pids.read_text()) if pids.is_file() else []:
        if running(pid):
            os.kill(pid, signal.SIGKILL)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], wait_s: float = 10) -> bool:
    """Whether all of them end within a while."""
    deadline = time.monotonic() + wait_s
    while any(running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
