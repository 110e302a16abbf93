"""``leret store``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from leret.cli.console import AsJson, RunOption, done, facts

app = typer.Typer(help="Check, merge and export the samples of a run.", no_args_is_help=True)


@app.command("check", epilog="Example: leret store check --run runs/mine")
def check(run: RunOption, as_json: AsJson = False) -> None:
    """Prove that a store is sound: file, rows, paths, rewards; writes nothing, exits 1 where something is wrong."""
    from leret.core.errors import RunError
    from leret.core.runs import Run
    from leret.sampling.store.check import check_store

    opened = Run.open(run)
    report = check_store(opened)
    facts(report, vars(report) | {"faults": None})
    if report.faults:
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{opened.store} has {len(report.faults)} kinds of faults:\n{listed}").failed()
    done(f"{opened.store} is sound")


@app.command("merge", epilog="Example: leret store merge runs/mine /disk2/mine /disk3/mine")
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory that gets the samples.")],
    shards: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SHARD", help="Run directories that shards were sampled in elsewhere."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put what shards have sampled into a run, each sample once; without SHARD, the run's own R/shards."""
    from leret.core.runs import Run
    from leret.sampling.store.merge import merge_shards

    counts = merge_shards(Run.open(run), shards or ())
    done(f"merged; `leret sample RECIPE --run {run}` samples what is left, and makes the preferences")
    facts(counts)


@app.command("export", epilog="Example: leret store export --run runs/mine --out samples.jsonl")
def export(
    run: RunOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to; - is standard output, for jsonl.")],
    to: Annotated[Literal["jsonl", "parquet"], typer.Option(help="The format.")] = "jsonl",
    messages: Annotated[bool, typer.Option("--messages", help="Add the messages of each sample's state.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
) -> None:
    """Write one row a sample: question, step, prompt, completion, query, ranking, reward, error."""
    from leret.core.runs import Run
    from leret.sampling.store.export import export_store

    opened = Run.open(run)
    if str(out) == "-":
        export_store(opened, to, sys.stdout, messages=messages)
        return
    n = export_store(opened, to, out, messages=messages, force=force)
    done(f"{n:,} samples in {out}")
