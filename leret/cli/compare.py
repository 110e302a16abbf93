"""``leret runs`` and ``leret compare``: runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from leret.cli import console
from leret.cli.console import AsJson
from leret.core.progress import plain

Form = Annotated[
    Literal["console", "markdown", "latex"], typer.Option(help="Format of the tables.")
]


def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory with runs.")] = Path(
        "runs"
    ),
    form: Form = "console",
    as_json: AsJson = False,
) -> None:
    """List runs: what was sampled, trained and evaluated, the main figures, and what is unfinished."""
    from leret.evaluation.report.runs import list_runs, table

    listed = list_runs(directory)
    values = {"runs": listed} if as_json else None
    _print([("", *table(listed))], form, values)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN ...", help="Run directories, the baseline first.")
    ],
    measure: Annotated[
        str | None, typer.Option(help="Measure to compare.", show_default="main measure")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the evaluations, as in dev.")
    ] = None,
    form: Form = "console",
    as_json: AsJson = False,
) -> None:
    """Compare evaluated runs: averages over seeds, differences with intervals, tests and effect sizes."""
    from leret.core.runs import Run
    from leret.evaluation.report.comparison import WORDS, compare_runs, tables

    result = compare_runs([Run.open(path) for path in dict.fromkeys(runs)], measure, evaluation)
    _print(tables(result), form, result if as_json else None)
    if form == "console" and result["comparisons"]:
        console.say(WORDS)


def _print(
    tables: Sequence[tuple[str, Sequence[str], Any]], form: str, values: Mapping[str, Any] | None
) -> None:
    """Print tables in a format, or ``values`` if they are set."""
    from leret.evaluation.report.comparison import FORMS

    if values is not None:
        return console.facts(values)
    for title, columns, rows in tables:
        if form == "console":
            console.table(columns, rows, title)
        else:
            typer.echo(plain(FORMS[form](columns, rows)) + "\n")
