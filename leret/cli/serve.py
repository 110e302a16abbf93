"""``leret serve policy`` and ``leret serve retriever``."""

from __future__ import annotations

import signal
import time
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leret.cli.console import (
    Host,
    Overrides,
    Port,
    TokenEnv,
    complain,
    done,
    output_file,
    say,
)

if TYPE_CHECKING:
    from leret.policies.serving.launch import ServerPlan

app = typer.Typer(help="Serve a policy or a retriever.", no_args_is_help=True)

_WATCH_S = 0.25


@app.command("policy", epilog="Example: leret serve policy ipo --run runs/mine --engine vllm")
def policy(
    policy: Annotated[
        str,
        typer.Argument(metavar="POLICY", help="Model, policy directory, demo, or policy of --run."),
    ],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="Arguments for the engine, after --."),
    ] = None,
    engine: Annotated[
        Literal["vllm", "tgi"], typer.Option(help="Server software to start.")
    ] = "vllm",
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Run directory. POLICY is then base or a policy of the run."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Annotated[
        str | None, typer.Option(help="Model name in requests.", show_default="POLICY-DIGEST")
    ] = None,
    executable: Annotated[
        str | None, typer.Option(help="Engine executable.", show_default="from PATH")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Variable with the API key for clients.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Maximum seconds until the server is ready.")
    ] = 600.0,
    log: Annotated[Path | None, output_file("File for the server's output.")] = None,
    dry: Annotated[
        bool, typer.Option("--print", help="Print the command without running it.")
    ] = False,
) -> None:
    """Start an LM server for a policy, wait until it is ready, and stop it on Ctrl-C."""
    from leret.core.runs import Run
    from leret.http.endpoints import Listening
    from leret.policies.serving.launch import free_port, plan
    from leret.policies.serving.model import resolve_policy

    served = resolve_policy(policy, None if run is None else Run.open(run), name)
    at = Listening(host, port or free_port(host))
    server_plan = plan(
        served,
        engine,
        at,
        executable=executable,
        extra=extra or (),
        api_key_env=api_key_env,
    )
    say(server_plan.line)
    if not dry:
        _run_until_stopped(server_plan, timeout, log)


def _run_until_stopped(server_plan: ServerPlan, timeout: float, log: Path | None) -> None:
    """Run a server until a signal. Exit with the signal's code if the server was not ready yet."""
    from leret.policies.serving.launch import run_server

    ready = False
    tell = partial(complain, label="")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with run_server(server_plan, timeout_s=timeout, log=log, tell=tell) as child:
            ready = True
            done(f"serving {server_plan.served.name} at {server_plan.at.url}/v1")
            say(server_plan.recipe)
            while True:
                child.check_alive()
                time.sleep(_WATCH_S)
    except KeyboardInterrupt as stopped:
        number = signal.Signals(stopped.args[0])
        tell(f"stopped ({number.name})")
        if not ready:
            raise typer.Exit(128 + number) from None


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


@app.command("retriever", epilog="Example: leret serve retriever indexes/mine --port 8893")
def retriever(
    index: Annotated[
        str, typer.Argument(metavar="INDEX", help="An index directory; see `leret index build`.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8893,
    token_env: TokenEnv = None,
    overrides: Overrides = None,
) -> None:
    """Serve an index to dspy.ColBERTv2, leret's remote retriever (kind: remote) and search-RL projects."""
    from leret.config.load import flag_settings
    from leret.http.endpoints import ApiKey
    from leret.http.serving import serve
    from leret.retrieval.load import open_retriever
    from leret.retrieval.server.app import RetrieverServer
    from leret.retrieval.server.schemas import ServerLimits, ServerSettings

    token = ApiKey.from_env(token_env, "--token-env").reveal()
    if token is None and not is_loopback(host):
        complain(
            f"--host {host} lets every machine on the network search; set a token with --token-env",
            "warning: ",
        )
    limits = flag_settings(ServerLimits, {}, {}, overrides or ())
    settings = ServerSettings(token=token, host=host, **limits.model_dump())
    loaded = open_retriever(index)
    server = RetrieverServer(loaded, settings)
    # The first search is slow: it compiles code and maps files.
    loaded.retriever.search(["warm up"], 1)

    def ready(url: str) -> None:
        documents = "" if loaded.documents is None else f", {loaded.documents:,} documents"
        say(f"serving {index} ({loaded.engine}{documents}) at {url}")

    import asyncio  # imported late to keep `leret --help` fast

    asyncio.run(serve(server.application(), host, port, ready=ready, drain_s=settings.drain_s))


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect to a server on ``host``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
