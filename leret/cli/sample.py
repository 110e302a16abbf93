"""``leret sample``, ``rescore``, ``replay`` and ``store``: make, score, check and export samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leret.cli import console
from leret.cli.console import DryRun, NewRunOption, Overrides, RecipeArgument, RunOption
from leret.core.errors import ConfigError, RunError
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.sampling import RewardSettings, SamplingRecipe
    from leret.core.runs import Run
    from leret.sampling.trial import TrialReport

_RECIPE = (".yaml", ".yml")
_SHOWN = 20  # differences that `leret replay` prints

app = typer.Typer(help="Check and export the samples of a run.", no_args_is_help=True)


def sample(
    recipe: RecipeArgument,
    run: NewRunOption = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial", help="Try the formats that fit the policy on 30 questions, then exit."
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Sample only shard I of N, with I from 0 to N-1."),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Merge another machine's run first. Repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sample in N processes of a Ray cluster.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster: auto, HOST:PORT or ray://; default: a new cluster."),
    ] = None,
) -> None:
    """Try several queries at each state of a program, and reward each query."""
    from leret.core.runs import Run

    settings = console.sampling_recipe(recipe, overrides or [])
    if address is not None and workers is None:
        raise ConfigError(f"--address {address} needs --workers N; add it or remove --address")
    if shard is not None and (workers is not None or merge):
        raise ConfigError(
            f"--shard {shard} cannot be used with --workers or --merge; remove one of them"
        )
    if trial:
        if dry_run or merge or shard is not None or workers is not None:
            raise ConfigError(
                "--trial stands alone; remove --dry-run, --merge, --shard and --workers"
            )
        return _show_trial(settings)
    if dry_run and merge:
        raise ConfigError("--dry-run merges nothing; remove it or --merge")
    console.warn_of_scope(settings.policy.model, settings.data.kind, settings.program.path)
    from leret.sampling.estimate import estimate  # slow to import, so check the recipe first
    from leret.sampling.sharding import RayCluster
    from leret.sampling.stage import sample as stage
    from leret.sampling.store.merge import merge_shards

    path = console.run_path(run, recipe)
    if dry_run:
        return console.facts(estimate(settings, Run(path)))
    if shard is not None:
        return _sample_shard(settings, recipe, path, shard)
    if merge:
        merge_shards(Run.open(path), merge)
    with (
        nullcontext() if workers is None else RayCluster(workers, address) as cluster,
        shown() as progress,
    ):
        report = stage(settings, Run.create(path), progress=progress, distribute=cluster)
    if report.already:
        console.done(f"nothing to do: {path} is complete")
    else:
        console.done(f"sampled into {path}")
    console.facts(report)
    console.next_command("train", recipe, path)


def _sample_shard(settings: SamplingRecipe, recipe: str, path: Path, shard: str) -> None:
    from leret.core.runs import Run
    from leret.sampling.sharding import Shard, sample_shard

    part = Shard.parse(shard)
    run = Run.create(path)
    with shown() as progress:
        stats = sample_shard(settings, run, part, progress=progress)
    console.done(
        f"shard {shard}: {part.store(run)}; merge all shards: leret sample {recipe} --run {path}"
    )
    console.facts(stats)


def _show_trial(recipe: SamplingRecipe) -> None:
    report = run_trial(recipe)
    if report.best is not None:
        console.done(f"use: {report.best.flags}")


def run_trial(recipe: SamplingRecipe) -> TrialReport:
    """Try formats, and print a row per format, best first."""
    from leret.sampling.trial import TEMPERATURES, try_formats

    with TemporaryDirectory() as cache, shown() as progress:
        report = try_formats(recipe, Path(cache), progress=progress)
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


def rescore(
    run: RunOption,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A name, FILE.py:function, {parts: ...} as YAML, or a recipe.",
            show_default="the run's, if its code has changed",
        ),
    ] = None,
    strategy: Annotated[
        Literal["adjacent", "best-worst", "all", "margin"] | None,
        typer.Option(help="How to pair samples by reward.", show_default="as before"),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0.0, help="Minimum reward difference (--strategy margin).")
    ] = None,
    max_pairs: Annotated[
        int | None, typer.Option(min=1, help="Maximum pairs per state, largest margins first.")
    ] = None,
) -> None:
    """Recompute the rewards of a run's samples, if they change, and rebuild the pairs. Calls no LM."""
    from leret.core.runs import Run
    from leret.rollouts.environment import has_new_reward
    from leret.sampling.rescore import pair_settings
    from leret.sampling.rescore import rescore as stage

    options = {"strategy": strategy, "margin": margin, "max_pairs": max_pairs}
    pairing = {name: value for name, value in options.items() if value is not None}
    directory = Run.open(run)
    directory.sampling()
    pairs_by = pair_settings(directory, pairing)["strategy"]
    if margin and pairs_by != "margin":
        raise ConfigError(
            f"--margin {margin} needs --strategy margin, but the strategy is {pairs_by}; "
            "add it or remove --margin"
        )
    if reward is None and not has_new_reward(directory):
        return _rebuild_pairs(directory, pairing)
    spec = None if reward is None else _spec(reward)
    with shown() as progress:
        report = stage(directory, spec, pairing=pairing, progress=progress)
    console.done(f"{report.changed:,} of {report.samples:,} rewards changed")
    console.facts(report)


def _rebuild_pairs(run: Run, pairing: Mapping[str, Any]) -> None:
    from leret.rollouts.environment import refuse_changes_since_sampling
    from leret.sampling.preferences.dataset import build_preferences
    from leret.sampling.rescore import pair_settings

    refuse_changes_since_sampling(run, "pairs")
    report = build_preferences(run, **pair_settings(run, pairing))
    console.done(f"{report.pairs:,} pairs saved to {report.path}")
    console.facts(report)


def _spec(text: str) -> str | RewardSettings:
    from leret.config.load import flag_recipe
    from leret.core.yaml import parse

    if text.endswith(_RECIPE):
        reward, *final = console.sampling_recipe(text).sampling.rewards
        if final:
            console.complain(
                "sampling.final is ignored; only step rewards are computed again", label="note: "
            )
        return reward
    value = parse(text, "--reward").value if text.lstrip().startswith("{") else text
    recipe = {"data": {"kind": "world"}, "sampling": {"reward": value}}
    return flag_recipe(recipe, {"sampling.reward": "--reward"}).sampling.reward


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    sample: Annotated[
        str | None, typer.Option(metavar="ID", help="Replay only the sample with this id.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Replay N random samples.", show_default="all"),
    ] = None,
) -> None:
    """Compute samples again with the run's own program, retriever, reward and policy, and compare them with the store.

    Exit with code 1 if a sample differs.

    `leret store check` runs no model and none of the run's code.
    """
    from leret.core.runs import Run
    from leret.sampling.replay import replay as stage

    directory = Run.open(run)
    with shown() as progress:
        report = stage(directory, sample, n_random=random, progress=progress)
    console.facts(report, vars(report) | {"differences": None})
    n_equal = report.equal + report.rounded
    result = f"{n_equal:,} of {report.samples:,} samples equal the store"
    if report.differences:
        listed = "\n".join(f"  {difference}" for difference in report.differences[:_SHOWN])
        raise RunError(f"only {result}; --json lists all differences:\n{listed}").failed()
    console.done(result)


@app.command("check", epilog="Example: leret store check --run runs/mine")
def check(run: RunOption) -> None:
    """Check a run's store: file, rows, paths and rewards. Exit with code 1 if there are faults.

    Runs no model and none of the run's code; `leret replay` computes the samples again.
    """
    from leret.core.runs import Run
    from leret.sampling.store.check import check_store

    directory = Run.open(run)
    report = check_store(directory)
    console.facts(report, vars(report) | {"faults": None})
    if report.faults:
        listed = "\n".join(f"  {fault}" for fault in report.faults)
        raise RunError(f"{directory.store} has faults:\n{listed}").failed()
    console.done(f"{directory.store} has no faults")


@app.command("export", epilog="Example: leret store export --run runs/mine --out samples.jsonl")
def export(
    run: RunOption,
    out: Annotated[Path, console.output_file("File: .parquet, or else JSON lines; - for stdout.")],
    messages: Annotated[
        bool, typer.Option("--messages", help="Include each sample's messages.")
    ] = False,
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
    to_stdout = str(out) == "-"
    file = sys.stdout if to_stdout else out
    if tokenizer is not None and form != "rl":
        raise ConfigError(f"--tokenizer {tokenizer} needs --form rl; the form is {form}")
    if form == "samples":
        n = export_store(directory, file, messages=messages)
    else:
        rows, columns = _trainer_rows(directory, form, tokenizer)
        n = export_rows(rows, columns, file)
    if to_stdout:
        return
    noun = "samples" if form == "samples" else "rows"
    console.done(f"{n:,} {noun} saved to {out}")
    console.facts({"path": out, "rows": n}, {})


def _trainer_rows(
    run: Run, form: str, tokenizer: Path | None
) -> tuple[Iterator[dict[str, Any]], dict[str, str]]:
    """Return the rows of a form for trainers, and the types of their columns."""
    from leret.sampling.store.export import message_column
    from leret.training.data import RunSamples, completion_rows
    from leret.training.stored import kto, sft
    from leret.training.stored.export import GRPO_COLUMNS, RL_COLUMNS, grpo_rows, rl_rows

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
