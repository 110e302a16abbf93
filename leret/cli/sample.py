"""``leret sample``, ``leret pairs`` and ``leret store``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipInvalid
from leret.core.errors import ConfigError, RunError
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.sampling import SamplingRecipe
    from leret.core.runs import Run
    from leret.sampling.trial import TrialReport

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
        str | None,
        typer.Option(metavar="I/N", help="Sample only shard I of N, with I from 0 to N-1."),
    ] = None,
    engine: Annotated[
        Literal["process", "ray"], typer.Option(help="Sample in this process or on a Ray cluster.")
    ] = "process",
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes for --engine ray.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Cluster for --engine ray: auto, HOST:PORT or ray://; default: a new cluster."
        ),
    ] = None,
) -> None:
    """Try several queries at each state of a program, and reward each query."""
    from leret.core.runs import Run

    settings = console.sampling_recipe(
        recipe, (overrides or []) + ["data.skip_invalid=true"] * skip_invalid
    )
    if engine == "process" and (workers is not None or address is not None):
        raise ConfigError(
            "--workers and --address need --engine ray; add --engine ray or remove the flags"
        )
    if engine == "ray" and (workers is None or shard is not None):
        raise ConfigError(
            "--engine ray needs --workers N and cannot use --shard; add --workers N or remove --shard"
        )
    console.warn_of_scope(settings.policy.model, settings.data.kind, settings.program.path)
    from leret.sampling.estimate import estimate  # slow to import, so check the recipe first
    from leret.sampling.sharding import RayCluster, Shard, sample_shard
    from leret.sampling.stage import sample as stage

    if dry_run:
        return console.facts(estimate(settings, Run(run)))
    if shard is not None:
        part = Shard.parse(shard)
        directory = Run.create(run)
        with shown() as progress:
            stats = sample_shard(settings, directory, part, progress=progress)
        console.done(
            f"shard {shard}: {part.store(directory)}; "
            f"merge all shards: leret sample {recipe} --run {run}"
        )
        return console.facts(stats)
    with (
        nullcontext() if workers is None else RayCluster(workers, address) as cluster,
        shown() as progress,
    ):
        report = stage(settings, Run.create(run), progress=progress, distribute=cluster)
    if report.already:
        console.done(f"nothing to do: {run} is complete")
    else:
        console.done(f"sampled into {run}")
    console.facts(report)
    console.next_command("train", recipe, run)


def trial(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    questions: Annotated[int, typer.Option(min=5, help="Questions for the best formats.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Try the formats that fit a policy on a few questions, and name the one with the highest reward."""
    report = run_trial(console.sampling_recipe(recipe, overrides or []), questions)
    if report.best is not None:
        console.done(f"use: {report.best.flags}")


def run_trial(recipe: SamplingRecipe, n_questions: int = 30) -> TrialReport:
    """Try formats, and print a row per format, best first."""
    from leret.sampling.trial import TEMPERATURES, try_formats

    with TemporaryDirectory() as cache, shown() as progress:
        report = try_formats(recipe, Path(cache), progress=progress, n_questions=n_questions)
    rows = []
    for tried in report.formats:
        row = [tried.name]
        for temperature in TEMPERATURES:
            row += [f"{value:.2f}" for value in tried.measured(temperature)]
        n_questions = len(tried.searches.get(0.0, ()))
        rows.append([*row, str(tried.max_tokens), str(n_questions)])
        if tried.fault:
            console.complain(f"{tried.name}: {tried.fault}", "note: ")
    at_0 = ["parsed", "cut", report.reward]
    columns = ["format", *at_0, *(f"{name}, T=1" for name in at_0), "max_tokens", "questions"]
    console.table(columns, rows, values=report)
    if report.best is None:
        console.complain("no completion parses in any format; choose another model", "warning: ")
        return report
    best = report.best
    if best.temperature not in TEMPERATURES:
        parsed, cut, reward = (f"{value:.2f}" for value in best.measured(best.temperature))
        console.say(
            f"{best.name} at temperature {best.temperature}: "
            f"parsed {parsed}, cut {cut}, {report.reward} {reward}"
        )
    if not best.works:
        console.complain(
            "no format parses and ends at nearly all questions; the best is used", "warning: "
        )
    return report


def pairs(
    run: RunOption,
    strategy: Annotated[Strategy, typer.Option(help="How to pair samples by reward.")] = "adjacent",
    margin: Annotated[
        float, typer.Option(min=0.0, help="Minimum reward difference (--strategy margin).")
    ] = 0.0,
    max_pairs: Annotated[
        int | None, typer.Option(min=1, help="Maximum pairs per state, largest margins first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the preference pairs of a run without sampling."""
    from leret.core.runs import Run
    from leret.rollouts.environment import refuse_changes_since_sampling
    from leret.sampling.preferences.dataset import build_preferences

    if margin and strategy != "margin":
        raise ConfigError(f"--margin {margin} needs --strategy margin; the strategy is {strategy}")
    directory = Run.open(run)
    directory.section("sampling", "leret sample RECIPE")
    refuse_changes_since_sampling(directory, "pairs")
    report = build_preferences(directory, strategy, margin, max_pairs)
    console.done(f"{report.pairs:,} pairs saved to {report.path}")
    console.facts(report)


@app.command("check", epilog="Example: leret store check --run runs/mine")
def check(run: RunOption, as_json: AsJson = False) -> None:
    """Check a run's store: file, rows, paths and rewards. Exit with code 1 if there are faults."""
    from leret.core.runs import Run
    from leret.sampling.store.check import check_store

    directory = Run.open(run)
    report = check_store(directory)
    console.facts(report, vars(report) | {"faults": None})
    if report.faults:
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{directory.store} has faults:\n{listed}").failed()
    console.done(f"{directory.store} has no faults")


@app.command("merge", epilog="Example: leret store merge runs/mine /disk2/mine /disk3/mine")
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory to merge into.")],
    shards: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SHARD", help="Run directories from other machines."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge samples from shards into a run. Without SHARD, merge all shards in the run's shards directory."""
    from leret.core.runs import Run
    from leret.sampling.store.merge import merge_shards

    counts = merge_shards(Run.open(run), shards or ())
    console.done(
        f"merged; sample the remaining questions and build preferences with: leret sample RECIPE --run {run}"
    )
    console.facts(counts)


@app.command("export", epilog="Example: leret store export --run runs/mine --out samples.jsonl")
def export(
    run: RunOption,
    out: Annotated[Path, console.output_file("Output file; - for stdout (jsonl only).")],
    to: Annotated[
        Literal["jsonl", "parquet"] | None,
        typer.Option(help="File format; default: by FILE's ending, else jsonl."),
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Include each sample's messages.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing FILE.")] = False,
    form: Annotated[
        Literal["samples", "sft", "kto", "grpo", "rl", "retriever"],
        typer.Option(
            help="All samples; rows for TRL's trainers; tokens (rl); or documents with scores (retriever)."
        ),
    ] = "samples",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Tokenizer of a policy that was sampled on a server (--form rl)."
        ),
    ] = None,
) -> None:
    """Export one row per sample (question, step, completion, query, ranking, reward, error), or rows for a trainer."""
    from leret.core.runs import Run
    from leret.sampling.store.export import export_rows, export_store

    directory = Run.open(run)
    file = sys.stdout if str(out) == "-" else out
    if to is None:
        to = "parquet" if out.suffix == ".parquet" else "jsonl"
    if tokenizer is not None and form != "rl":
        raise ConfigError(f"--tokenizer {tokenizer} needs --form rl; the form is {form}")
    if form == "samples":
        n = export_store(directory, to, file, messages=messages, force=force)
    else:
        rows, columns = _trainer_rows(directory, form, tokenizer)
        n = export_rows(rows, columns, to, file, force=force)
    if file is out:
        noun = "samples" if form == "samples" else "rows"
        console.done(f"{n:,} {noun} saved to {out}")


def _trainer_rows(
    run: Run, form: str, tokenizer: Path | None
) -> tuple[Iterator[dict[str, Any]], dict[str, str]]:
    """Return the rows of a form for trainers, and the types of their columns."""
    from leret.sampling.store.export import message_column
    from leret.training.data import RunSamples, completion_rows
    from leret.training.rounds.export import GRPO_COLUMNS, RL_COLUMNS, grpo_rows, rl_rows
    from leret.training.stored import kto, sft

    if form == "rl":
        return rl_rows(run, tokenizer), RL_COLUMNS
    if form == "retriever":
        from leret.rollouts.environment import Environment
        from leret.training.algorithms import TrainingRecipe

        algorithm = TrainingRecipe.find("retriever-kl")
        with Environment.open(run) as environment:
            return iter(list(algorithm.rows(run, environment))), algorithm.row_columns
    if form == "grpo":
        rows = grpo_rows(run)
        columns = GRPO_COLUMNS
    else:
        algorithm = sft.SFT if form == "sft" else kto.KTO
        recipe = algorithm.settings.model_validate({"algorithm": form})
        examples = algorithm.examples(recipe, RunSamples(run))
        rows, columns = completion_rows(examples, labelled=form == "kto")
    return rows, {**columns, "prompt": message_column(run.store)}
