"""``leret sample`` and ``leret pairs``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Literal

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipInvalid

Strategy = Literal["adjacent", "best-worst", "all", "margin"]
"""How pairs are made of the samples at a state."""
Engine = Literal["process", "ray"]
"""Where sampling is done."""


def sample(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Sample every N-th question from the I-th (from 0) into R/shards alone."),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Sample in this process, or on a Ray cluster.")] = "process",
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of engine ray: processes.")] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Of engine ray: auto, HOST:PORT, ray://; else one starts here."),
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
    from leret.sampling.plan import plan  # after the recipe is read: a mistake in it is told at once
    from leret.sampling.sharding import RayCluster, Shard, sample_shard
    from leret.sampling.stage import sample as stage

    if dry_run:
        console.facts(plan(settings, Run(run)))
        return
    if shard is not None:
        part = Shard.parse(shard)
        with console.shown() as progress:
            stats = sample_shard(settings, Run.create(run), part, progress=progress)
        merge = f"`leret sample {recipe} --run {run}` merges all shards"
        console.done(f"shard {shard} is in {part.store(Run(run))}; {merge}")
        console.facts(stats)
        return
    with nullcontext() if workers is None else RayCluster(workers, address) as cluster, console.shown() as progress:
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
    from leret.sampling.preferences.dataset import build_preferences

    if margin and strategy != "margin":
        raise ConfigError(f"--margin {margin}: strategy {strategy} takes none; add --strategy margin")
    opened = Run.open(run)
    opened.section("sampling", "leret sample RECIPE")
    report = build_preferences(opened, strategy, margin, max_pairs)
    console.done(f"{report.pairs:,} pairs in {report.path}")
    console.facts(report)
