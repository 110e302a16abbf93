"""A server as a child process: its own process group, its log in a file, and no orphan when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from leret.core.errors import PolicyError

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_S = 0.05
_TAIL_BYTES = 64 * 1024


class ServerProcess:
    """A process that is started once and stopped once.

    Its group is its own, so that Ctrl-C at a terminal reaches leret alone, which then ends all of the group. On Linux
    the kernel ends it too when leret is killed outright.

    Args:
        command: program and arguments.
        environment: all of it.
        log: gets standard output and standard error.
        secret: left out of what is repeated from the log.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, secret: str | None = None
    ) -> None:
        self.log = log
        self._secret = secret
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process.

        Raises:
            PolicyError: the program or its log cannot be opened.
        """
        # Between fork and exec as little as possible is done, so the function is looked up here.
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
                    # A group, so that the terminal's Ctrl-C is not the server's too. Not a session: Linux shares
                    # processors out by session, and beside a server that spins (vLLM on CPUs) a client in another one
                    # hardly gets any.
                    process_group=0,
                    preexec_fn=prctl and (lambda: prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)),  # noqa: PLW1509
                )
        except OSError as error:
            raise PolicyError(
                f"{error.filename or self._command[0]} cannot be opened ({error.strerror}); see that it can be run, "
                "and that the log's folder can be written"
            ) from error

    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def check_alive(self) -> None:
        """Raise a PolicyError with the last lines of the log where the process has ended."""
        code = self.exit_code()
        if code is not None:
            ended = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
            raise PolicyError(f"the server {ended}; its log is {self.log}{self.last_words()}").failed()

    def last_words(self) -> str:
        """The end of a message: the last lines of the log."""
        lines = self.tail()
        return f". It ends with:\n{lines}" if lines else ", and is empty"

    def tail(self, n_lines: int = 15) -> str:
        """The last lines of the log, without the secret."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return self.hide("\n".join([line.rstrip() for line in lines if line.strip()][-n_lines:]))

    def hide(self, text: str) -> str:
        """What the server said, without the secret."""
        return text if self._secret is None else text.replace(self._secret, "[key]")

    def stop(self, grace_s: float) -> bool:
        """Ask the group to end, and kill what is left of it after ``grace_s`` seconds. May be called twice.

        Returns:
            Whether it ended by itself.
        """
        if self._process is None:
            return True
        group, deadline = self._process.pid, time.monotonic() + grace_s
        _signal(group, signal.SIGTERM)
        try:
            while time.monotonic() < deadline and (self._process.poll() is None or _alive(group)):
                time.sleep(_POLL_S)
        finally:  # an impatient second Ctrl-C cuts the grace short, and leaves no orphan either
            willing = self._process.poll() is not None and not _alive(group)
            _signal(group, signal.SIGKILL)
            self._process.wait()
        return willing


def _signal(group: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
        os.killpg(group, which)


def _alive(group: int) -> bool:
    """Whether a process of the group is left, also one whose parent is gone; zombies do not count."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
