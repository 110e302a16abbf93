"""Servers as child processes in a process group, with a log, a wait until they are warm, and no orphans."""

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
_REPORT_S, _ANSWER_S, _DYING_S = 15.0, 5.0, 2.0


class ServerProcess:
    """A process that is started once and stopped once.

    It has its own process group, so that Ctrl-C at a terminal reaches only leret, which then ends the group. On Linux
    the kernel ends it when leret is killed. The log gets all output; the key is removed from everything read from it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, key: ApiKey) -> None:
        self.log, self.key = log, key
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; PolicyError if the program or its log cannot be opened."""
        # Looked up here, since little may be done between fork and exec.
        prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    # A group, so that Ctrl-C does not reach the server. Not a session: Linux shares processors out by
                    # session, and a server that spins (vLLM on CPUs) would starve a client in another one.
                    process_group=0,
                    preexec_fn=prctl and (lambda: prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)),  # noqa: PLW1509
                )
        except OSError as error:
            raise PolicyError(
                f"{error.filename or self._command[0]} cannot be opened ({error.strerror}); see that it can be run, "
                "and that the log's folder can be written"
            ) from error

    def exit_code(self) -> int | None:
        """Return None while it runs, and a negative code if a signal ended it."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def check_alive(self) -> None:
        """Raise a PolicyError with the last lines of the log if the process has ended."""
        code = self.exit_code()
        if code is not None:
            raise self.failure(
                "the server " + (f"was ended by signal {-code}" if code < 0 else f"exited with code {code}")
            )

    def failure(self, what: str) -> PolicyError:
        lines = self.tail()
        return PolicyError(
            f"{what}; its log is {self.log}" + (f". It ends with:\n{lines}" if lines else ", and is empty")
        ).failed()

    def tail(self, n_lines: int = 15) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return self.key.redact("\n".join([line.rstrip() for line in lines if line.strip()][-n_lines:]))

    def stop(self, grace_s: float) -> bool:
        """End the group, by force after ``grace_s`` seconds; return whether it ended by itself."""
        if self._process is None:
            return True
        group, deadline = self._process.pid, time.monotonic() + grace_s
        _signal(group, signal.SIGTERM)
        try:
            while time.monotonic() < deadline and (self._process.poll() is None or _alive(group)):
                time.sleep(_POLL_S)
        finally:  # a second Ctrl-C ends the wait and leaves no orphan
            ended = self._process.poll() is not None and not _alive(group)
            _signal(group, signal.SIGKILL)
            self._process.wait()
        return ended


def _signal(group: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses if only zombies are left
        os.killpg(group, which)


def _alive(group: int) -> bool:
    """Return whether a process of the group, orphans included, is left; zombies do not count."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def wait_until_ready(
    server: ServerProcess, settings: OpenAIPolicySettings, *, timeout_s: float, tell: Callable[[str], None]
) -> None:
    """Wait until the server at ``settings.urls`` has answered one chat completion."""
    began = time.monotonic()
    [url] = settings.urls
    _wait_for_health(server, url.removesuffix("/v1"), timeout_s, tell)
    tell(f"healthy after {time.monotonic() - began:.0f} s; one completion to warm it")
    left = max(1.0, began + timeout_s - time.monotonic())
    try:
        asyncio.run(_complete(settings.model_copy(update={"timeout_s": left, "retry_for_s": 0.0})))
    except PolicyError as error:
        until = time.monotonic() + _DYING_S
        while time.monotonic() < until:  # connections close a moment before the process ends
            server.check_alive()
            time.sleep(_POLL_S)
        raise server.failure(f"{url} is healthy, but sent no completion ({error}); raise --timeout") from error
    server.check_alive()


def _wait_for_health(server: ServerProcess, url: str, timeout_s: float, tell: Callable[[str], None]) -> None:
    reported = began = time.monotonic()
    while True:
        server.check_alive()
        status = _health(url, min(_ANSWER_S, max(0.1, began + timeout_s - time.monotonic())))
        if status == 200:
            server.check_alive()  # another server may have taken the port
            return
        now = time.monotonic()
        if now > began + timeout_s:
            state = f"answers {status}" if status else "does not answer"
            raise server.failure(f"{url}/health {state} after {timeout_s:g} s; allow more with --timeout")
        if now - reported > _REPORT_S:
            reported = now
            tell(f"waiting for {url}, {now - began:.0f} s: {server.tail(1)[:160]}")
        time.sleep(5 * _POLL_S)


def _health(url: str, timeout_s: float) -> int:
    """Return the status of the server's /health; 0 if there is no answer."""
    import httpx

    try:  # not by a proxy, which does not see this machine's ports
        return httpx.get(f"{url}/health", timeout=timeout_s, trust_env=False).status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return 0


async def _complete(settings: OpenAIPolicySettings) -> None:
    async with aclosing(OpenAIPolicy(settings)) as policy:
        await policy.complete(Request(({"role": "user", "content": "Which city?"},), (0,), 0.0, 8))
