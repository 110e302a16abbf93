"""``leret serve retriever``."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Annotated

import typer

from leret.cli.console import complain, say


def retriever(
    index: Annotated[str, typer.Argument(metavar="INDEX", help="An index directory; see `leret index build`.")],
    host: Annotated[
        str, typer.Option(help="Where to listen; other machines reach it only if you say so.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8893,
    token_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the token that clients must send.")
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
        complain(
            f"{host} can be reached by other machines, and no --token-env is given: everybody may search", "warning: "
        )
    opened = open_retriever(index)
    settings = ServerSettings(
        token=token,
        host=host,
        max_waiting=max_waiting,
        max_batch=max_batch,
        max_k=max_k,
        max_documents=max_documents,
        max_body=int(max_body_mb * (1 << 20)),
    )
    server = RetrieverServer(
        opened.retriever, settings, engine=opened.engine, corpus=opened.corpus, documents=opened.documents
    )
    opened.retriever.search(["warm up"], 1)  # what is compiled or mapped at the first query is not the first client's

    def ready(url: str) -> None:
        documents = "" if opened.documents is None else f", {opened.documents:,} documents"
        say(f"serving {index} ({opened.engine}{documents}) at {url}")

    asyncio.run(serve(server, host, port, ready=ready, drain_s=drain))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
