"""``leret view`` shows runs in a browser or as files; ``leret compare`` puts runs side by side."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from leret.cli import console
from leret.cli.console import Host, Port
from leret.cli.serve import is_loopback
from leret.core.errors import ConfigError
from leret.core.progress import visible

Form = Annotated[
    Literal["console", "markdown", "latex"], typer.Option(help="Format of the tables.")
]


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run directories, the main one first.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 0,
    static: Annotated[
        Path | None, console.output_directory("Write the pages to a new directory instead.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="With --static: maximum questions, sampled and evaluated.")
    ] = 500,
    report: Annotated[
        bool, typer.Option("--report", help="Write the run's report.html again instead.")
    ] = False,
) -> None:
    """Show runs in a browser: the tree of samples of each question, pairs, trainings and evaluated systems."""
    if report:
        return _write_report(runs)
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
            return console.done(f"{n:,} pages in {static}; open {static / 'index.html'}")

        def ready(url: str) -> None:
            query = f"?token={token}" if token else ""
            secret = f"token={token}&" if token else ""
            console.say(f"{', '.join(viewer.runs)} at {url}/{query} (Ctrl-C stops it)")
            console.say(
                f"  most improved: {url}/questions?{secret}change=improved&sort=difference&desc=1"
            )
            console.say(f"  with failures: {url}/questions?{secret}failures=yes")

        asyncio.run(serve(viewer.application(), host, port, ready=ready, drain_s=1.0))


def _write_report(runs: Sequence[Path]) -> None:
    from leret.core.runs import Run
    from leret.viewer.report import write_report

    if len(runs) > 1:
        raise ConfigError(f"--report writes one report, but {len(runs)} runs are named; name one")
    page = write_report(Run.open(runs[0]))
    console.done(f"{page}  {page.stat().st_size / 1e6:.1f} MB")


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run directories, the baseline first; or a directory of runs, to list them.",
            show_default="runs",
        ),
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="Measure to compare.", show_default="main measure")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the evaluations, as in dev.")
    ] = None,
    form: Form = "console",
) -> None:
    """Compare evaluated runs, or list the runs of a directory.

    Compares averages over seeds, with intervals, tests and effect sizes of their differences.
    """
    from leret.core.runs import Run
    from leret.evaluation.report.comparison import WORDS, compare_runs, tables

    paths = list(dict.fromkeys(runs or [Path("runs")]))
    if len(paths) == 1 and not Run(paths[0]).manifest_path.is_file():
        if measure or evaluation:
            raise ConfigError(
                f"--measure and --evaluation compare runs, but {paths[0]} is not a run; name runs"
            )
        return _list_runs(paths[0], form)
    result = compare_runs([Run.open(path) for path in paths], measure, evaluation)
    _print(tables(result), form, result)
    if form == "console" and result["comparisons"]:
        console.say(WORDS)


def _list_runs(directory: Path, form: str) -> None:
    from leret.evaluation.report.runs import list_runs, table

    runs = list_runs(directory)
    _print([("", *table(runs))], form, {"runs": runs})


def _print(
    tables: Sequence[tuple[str, Sequence[str], Any]], form: str, values: Mapping[str, Any]
) -> None:
    """Print tables in a format, or ``values`` with ``--json``."""
    from leret.evaluation.report.comparison import FORMS

    if console.is_json():
        return console.facts(values)
    for title, columns, rows in tables:
        if form == "console":
            console.table(columns, rows, title)
        else:
            typer.echo(visible(FORMS[form](columns, rows)) + "\n")
