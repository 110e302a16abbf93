import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from leret.policies.serving.launch import free_port


def fake_engine(folder):
    """Write the fake engine as an executable; it records into the folder that FAKE_RECORD names."""
    path = folder / "engine"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("fake_engine.py")}" "$@"\n')
    path.chmod(0o755)
    return path


@dataclass
class Serve:
    record: Path
    executable: Path
    port: int
    out: str = ""
    err: str = ""
    process: subprocess.Popen[str] | None = None

    @property
    def flags(self):
        return ["--executable", str(self.executable), "--port", str(self.port)]

    def start(self, *arguments, mode="well", **environment):
        command = [sys.executable, "-m", "leret", "serve", "policy", *map(str, arguments)]
        added = {"FAKE_ENGINE": mode, "FAKE_RECORD": str(self.record), "TMPDIR": str(self.record.parent)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=os.environ | added | environment)

    def wait_for(self, text):
        for line in self.process.stdout:
            self.out += line
            if text in line:
                return
        self.end()
        raise AssertionError(f"no {text!r} in:\n{self.out}\n{self.err}")

    def end(self, stop=None):
        if stop is not None:
            self.process.send_signal(stop)
        out, err = self.process.communicate(timeout=60)
        self.out, self.err = self.out + out, self.err + err
        return self.process.returncode

    def recorded(self, name, wait_s=30):
        def read():
            with suppress(OSError, ValueError):
                return json.loads((self.record / name).read_text())

        return within(wait_s, read)


@pytest.fixture
def serve(tmp_path):
    server = Serve(tmp_path / "record", fake_engine(tmp_path), free_port("127.0.0.1"))
    yield server
    if server.process is not None and server.process.poll() is None:
        server.process.kill()
        server.process.communicate()
    for pid in server.recorded("pids.json", wait_s=0) or []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def running(pid):
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids):
    return bool(within(10, lambda: not any(map(running, pids))))


def within(seconds, look):
    deadline = time.monotonic() + seconds
    while not (value := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value
