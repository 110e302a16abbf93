"""``leret serve policy`` and ``leret serve retriever``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from leret.cli.console import Host, Port, complain, done, say

app = typer.Typer(help="Serve a policy or a retriever until it is stopped.", no_args_is_help=True)

_WATCH_S = 0.25


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@app.command("policy", epilog="Example: leret serve policy ipo --run runs/mine --engine vllm")
def policy(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's directory, demo, a model, or see --run.")],
    extra: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="After --: for the engine.")] = None,
    engine: Annotated[Literal["vllm", "sglang", "tgi"], typer.Option(help="The server to start.")] = "vllm",
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="POLICY is base, or a policy of this run.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Annotated[str | None, typer.Option(help="Of the model in requests.", show_default="with its digest")] = None,
    executable: Annotated[str | None, typer.Option(help="The engine's.", show_default="on PATH")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base first.")] = False,
    api_key_env: Annotated[str | None, typer.Option(metavar="VAR", help="Holds the key that clients send.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until it must answer.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to end in before it is killed.")] = 15.0,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Gets the server's output.")] = None,
    dry: Annotated[bool, typer.Option("--print", help="Print the command and end.")] = False,
) -> None:
    """Start a real LM server for a policy, wait until it answers, and stop it on Ctrl-C."""
    from leret.core.errors import PolicyError
    from leret.core.runs import Run
    from leret.policies.serving.engines import Listening
    from leret.policies.serving.launch import free_port, plan, run_server
    from leret.policies.serving.model import resolve_policy

    served = resolve_policy(policy, None if run is None else Run.open(run), name)
    at = Listening(host, port or free_port(host))
    planned = plan(
        served, engine, at, executable=executable, extra=extra or (), merge=merge, api_key_env=api_key_env, dry=dry
    )
    say(planned.line)
    if dry:
        return
    ready, tell = False, partial(complain, label="")
    try:
        with _stopping(), run_server(planned, timeout_s=timeout, grace_s=grace, log=log, tell=tell) as child:
            ready = True
            done(f"{planned.served.name} is served at {at.url}/v1")
            say(planned.recipe)
            while child.exit_code() is None:
                time.sleep(_WATCH_S)
            told = f"the server ended by itself with code {child.exit_code()}; its log is {child.log}"
            raise PolicyError(f"{told}. It ends with:\n{child.tail()}").failed()
    except _Stopped as stopped:
        tell(f"stopped ({stopped})")
        if not ready:
            raise typer.Exit(128 + stopped.number) from None


@contextmanager
def _stopping() -> Iterator[None]:
    """Ctrl-C, a polite kill and a closed terminal end the block; whatever runs in it cleans up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@app.command("retriever", epilog="Example: leret serve retriever indexes/mine --port 8893")
def retriever(
    index: Annotated[str, typer.Argument(metavar="INDEX", help="An index directory; see `leret index build`.")],
    host: Host = "127.0.0.1",
    port: Port = 8893,
    token_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Holds the token that clients must send.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Queries in the queue; more are answered 503.")] = 1024,
    max_batch: Annotated[int, typer.Option(min=1, help="Queries that the engine is asked at once.")] = 64,
    max_k: Annotated[int, typer.Option(min=1, help="Documents a query.")] = 1000,
    max_documents: Annotated[int, typer.Option(min=1, help="Queries times k of a request.")] = 64_000,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Size of a request.")] = 4.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for open requests when it is stopped.")] = 10.0,
) -> None:
    """Serve an index to dspy.ColBERTv2, to kind: remote, and to search-RL projects."""
    from leret.http.answers import ApiKey
    from leret.retrieval.load import open_retriever
    from leret.retrieval.server.app import RetrieverServer, ServerSettings, serve

    token = ApiKey.from_env(token_env, "--token-env").reveal()
    if token is None and not _is_loopback(host):
        told = "can be reached by other machines, and no --token-env is given: everybody may search"
        complain(f"{host} {told}", "warning: ")
    opened = open_retriever(index)
    settings = ServerSettings(
        token=token, host=host, max_waiting=max_waiting, max_batch=max_batch, max_k=max_k, max_documents=max_documents,
        max_body=int(max_body_mb * (1 << 20)),
    )  # fmt: skip
    server = RetrieverServer(
        opened.retriever, settings, engine=opened.engine, corpus=opened.corpus, documents=opened.documents
    )
    opened.retriever.search(["warm up"], 1)  # what is compiled or mapped at the first query is not the first client's

    def ready(url: str) -> None:
        documents = "" if opened.documents is None else f", {opened.documents:,} documents"
        say(f"serving {index} ({opened.engine}{documents}) at {url}")

    import asyncio  # here, since `leret --help` needs none of it

    asyncio.run(serve(server, host, port, ready=ready, drain_s=drain))


def _is_loopback(host: str) -> bool:
    try:
        import ipaddress

        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
