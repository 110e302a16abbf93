"""A server as a child process: its own process group, its log in a file, and no orphan when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from leret.core.errors import PolicyError

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_S = 0.05
_TAIL_BYTES = 64 * 1024


class Child:
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

    @property
    def pid(self) -> int:
        """Of the process, which is also its group's."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def start(self) -> None:
        """Start the process.

        Raises:
            PolicyError: the program or its log cannot be opened.
        """
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = self._spawn(log)
        except OSError as error:
            raise PolicyError(
                f"{error.filename or self._command[0]} cannot be opened ({error.strerror}); see that it can be run, "
                "and that the log's folder can be written"
            ) from error

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # A group, so that the terminal's Ctrl-C is not the server's too. Not a session: Linux shares processors out
            # by session, and beside a server that spins (vLLM on CPUs) a client in another one hardly gets any.
            process_group=0,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - it makes one system call and takes no lock
        )

    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def tail(self, n_lines: int = 15) -> str:
        """The last lines of the log."""
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
        """Ask the group to end, and kill what is left of it after a while. May be called twice.

        Args:
            grace_s: seconds to end in.

        Returns:
            Whether it ended by itself.
        """
        if self._process is None:
            return True
        group = self._process.pid
        deadline = time.monotonic() + grace_s
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
    try:
        os.killpg(group, which)
    except (ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
        return


def _alive(group: int) -> bool:
    """Whether a process of the group is left; zombies that nobody has waited for do not count where /proc tells."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not Path("/proc/self/stat").is_file():
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(member) == group and state not in {"Z", "X"}:
            return True
    return False


def _die_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec as little as possible is done

    def ask() -> None:
        prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)

    return ask
