"""Start and stop of inference servers: checks, command line, and context manager."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import ConfigError
from leret.http.endpoints import ApiKey, Listening
from leret.policies.serving.engines import (
    SERVERS,
    ServerKind,
    has_gpu,
    without_repeats,
)
from leret.policies.serving.model import ServedModel, resolve_policy
from leret.policies.serving.process import ServerProcess, wait_until_ready

_HOST = "127.0.0.1"

_OURS = {
    "-p": "--port",
    "--port": "--port",
    "--host": "--host",
    "--hostname": "--host",
    "--served-model-name": "--name",
    "--api-key": "--api-key-env",
}
"""Flags of ``leret serve`` by the engine option that they set."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The command, environment and address of a server.

    The model's name is its name in requests and recipes, too.
    """

    kind: ServerKind
    served: ServedModel
    command: tuple[str, ...]
    environment: Mapping[str, str]
    at: Listening
    api_key_env: str | None = None

    @property
    def line(self) -> str:
        """Command line for a shell, with environment variables."""
        settings = [
            f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())
        ]
        return " ".join([*settings, shlex.join(self.command)])

    @property
    def settings(self) -> OpenAIPolicySettings:
        return OpenAIPolicySettings(
            model=self.served.name, urls=(f"{self.at.url}/v1",), api_key_env=self.api_key_env
        )

    @property
    def recipe(self) -> str:
        """Line for a recipe that samples from this server."""
        key = f", api_key_env: {self.api_key_env}" if self.api_key_env else ""
        return f'policy: {{kind: openai, urls: ["{self.at.url}/v1"], model: "{self.served.name}"{key}}}'


def plan(
    served: ServedModel,
    engine: str,
    at: Listening,
    *,
    executable: str | None = None,
    extra: Sequence[str] = (),
    api_key_env: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ServerPlan:
    """Return the command, environment and address of a server for this model.

    Engine arguments in ``extra`` override leret's.
    """
    kind = SERVERS[engine]
    for argument in extra:
        ours = _OURS.get(argument.split("=", 1)[0])
        if ours:
            raise ConfigError(
                f"{argument}: leret sets this option; use `leret serve {ours}`, before the --"
            )
    gpu = has_gpu(environment)
    program = executable or environment.get(kind.variable) or kind.executable
    if served.adapter is not None and not kind.takes_adapters:
        raise ConfigError(
            f"{engine} cannot serve an adapter; run `leret merge {served.adapter} --out DIR`, and "
            "serve DIR"
        )
    command = without_repeats(kind.arguments(served, at, gpu), extra)
    local = {"HF_HUB_OFFLINE": "1"} if Path(served.weights).is_absolute() else {}
    added = {**kind.environment, **({} if gpu else kind.cpu_environment), **local}
    variables = {name: environment.get(name, value) for name, value in added.items()}
    return ServerPlan(kind, served, (program, *command, *extra), variables, at, api_key_env)


@contextmanager
def run_server(
    server_plan: ServerPlan,
    *,
    timeout_s: float = 600.0,
    grace_s: float = 15.0,
    log: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[ServerProcess]:
    """Start a server, wait until it has completed one prompt, run the block, and stop the server.

    The calling thread must outlive the block: Linux kills the server when that thread ends.
    ``timeout_s`` limits the time to the first completion. The server is killed ``grace_s`` after
    SIGTERM. The default log is a temporary file.
    """
    key = ApiKey.from_env(server_plan.api_key_env, "--api-key-env")
    kind = server_plan.kind
    environment = {**os.environ, **server_plan.environment}
    secret = key.reveal()
    if secret is not None:
        environment[kind.key_variable] = secret
    # Raise if the port is in use: another server would answer our requests.
    _bound(server_plan.at.host, server_plan.at.port).close()
    began = time.monotonic()
    log = log or _new_log(server_plan.served.name)
    advice = f"install it: {kind.install}; or set --executable or {kind.variable}"
    server = ServerProcess(server_plan.command, environment, log, key, advice)
    try:
        tell(f"log: {server.log}")
        wait_until_ready(server, server_plan.settings, timeout_s=timeout_s, tell=tell)
        tell(f"ready after {time.monotonic() - began:.1f} s")
        yield server
    finally:
        if not server.stop(grace_s):
            tell(f"the server did not end within {grace_s:g} s and was killed")


class BackgroundServer:
    """A server that a background thread controls.

    It is ready after construction, and runs until `close`.

    ``settings`` are policy settings for sampling from this server; ``arguments`` are passed to
    `plan`.
    """

    def __init__(
        self, policy: str, engine: str, timeout_s: float = 600.0, **arguments: Any
    ) -> None:
        at = Listening(_HOST, free_port(_HOST))
        server_plan = plan(resolve_policy(policy), engine, at, **arguments)
        self.settings = server_plan.settings
        self._ready: Future[None] = Future()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(server_plan, timeout_s), name="leret-server", daemon=True
        )
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # such as Ctrl-C, which only the main thread gets
            self._end.set()
            raise

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self, server_plan: ServerPlan, timeout_s: float) -> None:
        try:
            with run_server(server_plan, timeout_s=timeout_s):
                self._ready.set_result(None)
                self._end.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)


def free_port(host: str) -> int:
    """Return a free port; raise ConfigError if ``host`` is not an address of this machine."""
    with _bound(host, 0) as held:
        return int(held.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} is in use on {host}; choose another port, or 0 for a free one"
            ) from error
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error.strerror or error}"
        ) from error


def _new_log(name: str) -> Path:
    with tempfile.NamedTemporaryFile(
        prefix=f"leret-serve-{name.replace('/', '-')}-", suffix=".log", delete=False
    ) as file:
        return Path(file.name)
