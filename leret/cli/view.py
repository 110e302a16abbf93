"""``leret view``: pages of runs in a browser, or as files. ``leret report``: the report of a run."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from leret.cli.console import Host, Port, done, output_directory, say
from leret.cli.serve import is_loopback


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN ...", help="Run directories, the main one first.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 0,
    static: Annotated[
        Path | None, output_directory("Write the pages to a new directory instead.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="With --static: maximum questions, sampled and evaluated.")
    ] = 500,
) -> None:
    """Show runs in a browser: the tree of samples of each question, pairs, trainings and evaluated systems."""
    import asyncio  # imported late to keep `leret --help` fast

    from leret.core.runs import Run
    from leret.http.serving import serve
    from leret.viewer.app import Viewer
    from leret.viewer.static import write_site

    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="leret-view-") as scratch:
        viewer = Viewer([Run.open(path) for path in runs], Path(scratch), host=host, token=token)
        if static is not None:
            n = write_site(viewer.runs, static, limit, Path(scratch))
            return done(f"{n:,} pages in {static}; open {static / 'index.html'}")

        def ready(url: str) -> None:
            query = f"?token={token}" if token else ""
            secret = f"token={token}&" if token else ""
            say(f"{', '.join(viewer.runs)} at {url}/{query} (Ctrl-C stops it)")
            say(f"  most improved: {url}/questions?{secret}change=improved&sort=difference&desc=1")
            say(f"  with failures: {url}/questions?{secret}failures=yes")

        asyncio.run(serve(viewer.application(), host, port, ready=ready, drain_s=1.0))


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the evaluation, as in dev.")
    ] = None,
) -> None:
    """Write a run's report again, with its trainings, its last evaluation, and trees of selected questions."""
    from leret.core.runs import Run
    from leret.viewer.report import write_report

    page = write_report(Run.open(run), evaluation)
    done(f"{page}  {page.stat().st_size / 1e6:.1f} MB")
