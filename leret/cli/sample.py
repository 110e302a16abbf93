"""``leret sample``, ``leret pairs`` and ``leret store``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipInvalid
from leret.core.progress import shown

app = typer.Typer(help="Check, merge and export the samples of a run.", no_args_is_help=True)

Strategy = Literal["adjacent", "best-worst", "all", "margin"]


def sample(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Every N-th question from the I-th (from 0).")
    ] = None,
    engine: Annotated[Literal["process", "ray"], typer.Option(help="This process, or a Ray cluster.")] = "process",
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of engine ray: processes.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Of engine ray: auto, HOST:PORT, ray://; else one starts.")
    ] = None,
) -> None:
    """Try several queries at every state of a program, and score what they retrieve."""
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe
    from leret.core.errors import ConfigError
    from leret.core.runs import Run

    given = (overrides or []) + ["data.skip_invalid=true"] * skip_invalid
    settings = load_recipe(recipe, SamplingRecipe, given, check=console.known_names())
    if engine == "process" and (workers is not None or address is not None):
        raise ConfigError("--workers and --address belong to --engine ray; add it")
    if engine == "ray" and (workers is None or shard is not None):
        raise ConfigError("--engine ray requires --workers N, and makes its own shards: leave --shard out")
    console.warn_of_demo(settings.data.kind, settings.policy.model)
    from leret.sampling.estimate import estimate  # after the recipe is read: a mistake in it is told at once
    from leret.sampling.sharding import RayCluster, Shard, sample_shard
    from leret.sampling.stage import sample as stage

    if dry_run:
        console.facts(estimate(settings, Run(run)))
        return
    if shard is not None:
        part = Shard.parse(shard)
        with shown() as progress:
            stats = sample_shard(settings, Run.create(run), part, progress=progress)
        console.done(
            f"shard {shard} is in {part.store(Run(run))}; `leret sample {recipe} --run {run}` merges all shards"
        )
        console.facts(stats)
        return
    with nullcontext() if workers is None else RayCluster(workers, address) as cluster, shown() as progress:
        report = stage(settings, Run.create(run), progress=progress, distribute=cluster)
    console.done(f"nothing to do: {run} holds all of it" if report.already else f"sampled into {run}")
    console.facts(report)


def pairs(
    run: RunOption,
    strategy: Annotated[Strategy, typer.Option(help="Which samples are compared.")] = "adjacent",
    margin: Annotated[float, typer.Option(min=0.0, help="Least difference of rewards, for strategy margin.")] = 0.0,
    max_pairs: Annotated[int | None, typer.Option(min=1, help="Pairs kept a state, the widest margins first.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the preference pairs of a run again, without sampling."""
    from leret.core.errors import ConfigError
    from leret.core.runs import Run
    from leret.rollouts.environment import refuse_changes_since_sampling
    from leret.sampling.preferences.dataset import build_preferences

    if margin and strategy != "margin":
        raise ConfigError(f"--margin {margin}: strategy {strategy} takes none; add --strategy margin")
    opened = Run.open(run)
    opened.section("sampling", "leret sample RECIPE")
    refuse_changes_since_sampling(opened, "pairs")
    report = build_preferences(opened, strategy, margin, max_pairs)
    console.done(f"{report.pairs:,} pairs in {report.path}")
    console.facts(report)


@app.command("check", epilog="Example: leret store check --run runs/mine")
def check(run: RunOption, as_json: AsJson = False) -> None:
    """Prove that a store is sound: file, rows, paths, rewards; writes nothing, exits 1 where something is wrong."""
    from leret.core.errors import RunError
    from leret.core.runs import Run
    from leret.sampling.store.check import check_store

    opened = Run.open(run)
    report = check_store(opened)
    console.facts(report, vars(report) | {"faults": None})
    if report.faults:
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{opened.store} has {len(report.faults)} kinds of faults:\n{listed}").failed()
    console.done(f"{opened.store} is sound")


@app.command("merge", epilog="Example: leret store merge runs/mine /disk2/mine /disk3/mine")
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory that gets the samples.")],
    shards: Annotated[
        list[Path] | None, typer.Argument(metavar="SHARD", help="Runs that were sampled elsewhere.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put what shards have sampled into a run, each sample once; without SHARD, the run's own R/shards."""
    from leret.core.runs import Run
    from leret.sampling.store.merge import merge_shards

    counts = merge_shards(Run.open(run), shards or ())
    console.done(f"merged; `leret sample RECIPE --run {run}` samples what is left, and makes the preferences")
    console.facts(counts)


@app.command("export", epilog="Example: leret store export --run runs/mine --out samples.jsonl")
def export(
    run: RunOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to; - is standard output, for jsonl.")],
    to: Annotated[Literal["jsonl", "parquet"], typer.Option(help="The format.")] = "jsonl",
    messages: Annotated[bool, typer.Option("--messages", help="Add the messages of each sample's state.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
    form: Annotated[
        Literal["samples", "sft", "kto"], typer.Option(help="All samples, or what TRL's trainer of that name reads.")
    ] = "samples",
) -> None:
    """Write a row a sample (question, step, completion, query, ranking, reward, error), or the rows of a training."""
    from leret.core.runs import Run
    from leret.sampling.store.export import export_rows, export_store

    opened, file = Run.open(run), sys.stdout if str(out) == "-" else out
    if form == "samples":
        n = export_store(opened, to, file, messages=messages, force=force)
    else:
        from leret.training.algorithms import kto, sft
        from leret.training.data import RunSamples, completion_rows

        algorithm = sft.SFT if form == "sft" else kto.KTO
        recipe = algorithm.settings.model_validate({"algorithm": form})
        examples = algorithm.examples(recipe, RunSamples(opened))
        rows, columns = completion_rows(examples, labelled=form == "kto")
        n = export_rows(rows, columns, to, file, force=force)
    if file is out:
        console.done(f"{n:,} {'samples' if form == 'samples' else 'rows'} in {out}")
