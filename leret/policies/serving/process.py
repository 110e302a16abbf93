"""Servers as child processes: start, log, first completion, and stop without orphans."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.http.endpoints import ApiKey
from leret.policies.base import Request
from leret.policies.remote.openai import OpenAIPolicy

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_S = 0.05
_TAIL_BYTES = 64 * 1024
_REPORT_S = 15.0
_DYING_S = 2.0
_LOADING = {"connection", "overloaded"}  # kinds of error of a server that is not ready yet


class ServerProcess:
    """A server process, started by the constructor, with a log of its output. Stop it once.

    The process has a separate process group: Ctrl-C at a terminal reaches only leret, which then
    stops the group. On Linux, the kernel stops the process when leret is killed. Log lines are
    returned without the API key.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        key: ApiKey,
        advice: str = "check that the program is executable",
    ) -> None:
        """Start the process; raise PolicyError if the program or the log cannot be opened.

        ``advice`` says in that error what to do about the program.
        """
        self.log = log
        self.key = key
        # Look it up before the fork: few calls are safe between fork and exec.
        prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as stdout:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    # A new group keeps Ctrl-C from the server. A new session would too, but Linux
                    # divides CPU time between sessions, so that a busy-waiting server (vLLM on
                    # CPUs) would starve its client.
                    process_group=0,
                    preexec_fn=prctl and (lambda: prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)),  # noqa: PLW1509
                )
        except OSError as error:
            raise PolicyError(
                f"cannot open {error.filename or command[0]} ({error.strerror}); {advice}; "
                f"{self.log.parent} must be writable"
            ) from error

    def exit_code(self) -> int | None:
        """Return the exit code, negative if a signal ended the process; None while it runs."""
        return self._process.poll()

    def check_alive(self) -> None:
        """Raise a PolicyError with the last lines of the log if the process has ended."""
        code = self.exit_code()
        if code is not None:
            what = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise self.failure(f"the server {what}")

    def failure(self, what: str) -> PolicyError:
        lines = self.tail()
        end = f", which ends with:\n{lines}" if lines else " (empty)"
        return PolicyError(f"{what}; see its log {self.log}{end}").failed()

    def tail(self, n_lines: int = 15) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return self.key.redact("\n".join(lines[-n_lines:]))

    def stop(self, grace_s: float) -> bool:
        """Terminate the process group, and kill it after ``grace_s`` seconds.

        Return False if it had to be killed.
        """
        group = self._process.pid
        deadline = time.monotonic() + grace_s
        _signal(group, signal.SIGTERM)
        try:
            while time.monotonic() < deadline and (self._process.poll() is None or _alive(group)):
                time.sleep(_POLL_S)
        finally:  # runs also after a second Ctrl-C
            ended = self._process.poll() is not None and not _alive(group)
            _signal(group, signal.SIGKILL)
            self._process.wait()
        return ended


def _signal(group: int, which: signal.Signals) -> None:
    # macOS raises PermissionError if only zombies are left
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, which)


def _alive(group: int) -> bool:
    """Return whether any process of the group is running, orphans included.

    Zombies do not count.
    """
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def wait_until_ready(
    server: ServerProcess,
    settings: OpenAIPolicySettings,
    *,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    """Wait until the server has completed one prompt; raise PolicyError if it fails."""
    [url] = settings.urls
    reported = began = time.monotonic()
    while True:
        server.check_alive()
        left = max(1.0, began + timeout_s - time.monotonic())
        try:
            asyncio.run(
                _complete(settings.model_copy(update={"timeout_s": left, "retry_for_s": 0.0}))
            )
            break
        except PolicyError as error:
            now = time.monotonic()
            is_loading = getattr(error.__cause__, "kind", "") in _LOADING
            if not is_loading or now > began + timeout_s:
                while time.monotonic() < now + _DYING_S:  # a dying server closes connections first
                    server.check_alive()
                    time.sleep(_POLL_S)
                fault = f"{url} sent no completion within {now - began:.0f} s ({error})"
                raise server.failure(f"{fault}; increase --timeout") from error
            if now - reported > _REPORT_S:
                reported = now
                tell(f"waiting for {url}, {now - began:.0f} s: {server.tail(1)[:160]}")
            time.sleep(5 * _POLL_S)
    server.check_alive()  # if not, the answer came from another server on the port


async def _complete(settings: OpenAIPolicySettings) -> None:
    async with aclosing(OpenAIPolicy(settings)) as policy:
        await policy.complete(Request(({"role": "user", "content": "Which city?"},), (0,), 0.0, 8))
