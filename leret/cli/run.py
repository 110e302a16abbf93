"""``leret train``, ``leret eval`` and ``leret run``, the whole loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipInvalid
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


def train(
    context: typer.Context,
    recipe: RecipeArgument,
    run: RunOption,
    overrides: console.TrainingOverrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    launch: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="In several processes: fsdp, zero3, multi, a file, or accelerate's own."),
    ] = None,
) -> None:
    """Train the policy on a run's samples (sft, dpo, ipo, kto) or on fresh ones (grpo, rloo, ppo)."""
    from leret.config.load import load_recipe
    from leret.core.runs import Run
    from leret.training.algorithms import TrainingRecipe
    from leret.training.algorithms.base import refuse_processes

    settings = load_recipe(recipe, TrainingRecipe, overrides or ())
    opened = Run.open(run)
    opened.section("sampling", "leret sample RECIPE")
    from leret.training import stage  # after the recipe is read: a mistake in it is told at once

    if launch is not None:
        refuse_processes(settings)
    if dry_run:
        console.facts(stage.estimate(settings, opened))
        return
    if launch is not None:
        debug = ["--debug"] * bool(context.find_root().params.get("debug"))
        command = [*_launched(launch), *debug, "train", recipe, "--run", str(run)]
        command += [part for value in overrides or () for part in ("--set", value)]
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    first = os.environ.get("RANK", "0") == "0"  # of several processes one tells
    with shown() as progress:
        report = stage.train(settings, opened, progress=progress if first else None)
    if first:
        console.done(f"nothing to do: {report.path} is there" if report.already else f"trained {report.path}")
        console.facts(report)


def _launched(config: str) -> list[str]:
    """The command of leret in the processes of a configuration; ``accelerate`` is the one that the user has made."""
    from leret.core.bundled import root
    from leret.core.errors import ConfigError

    shipped = root() / "training/accelerate"
    file = shipped / f"{config}.yaml" if (shipped / f"{config}.yaml").is_file() else Path(config)
    if config != "accelerate" and not file.is_file():
        known = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
        raise ConfigError(
            f"--launch {config}: no such accelerate configuration; name a file, {known}, or accelerate for the one "
            "that `accelerate config` wrote"
        )
    of_file = [] if config == "accelerate" else ["--config_file", str(file)]
    return [sys.executable, "-m", "accelerate.commands.launch", *of_file, "-m", "leret"]


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The directory of a trained adapter.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets the merged model, in float32.")],
    as_json: AsJson = False,
) -> None:
    """Write a LoRA adapter merged into its base, and compare the logits of the two."""
    from leret.core.errors import ConfigError
    from leret.policies.checkpoints import find_model
    from leret.policies.serving.model import write_merged

    if out.exists():
        raise ConfigError(f"--out {out}: is there already, and is not overwritten; name another directory")
    difference = write_merged(find_model(adapter), out)
    console.done(f"merged into {out}; its logits differ by {difference:.1e} of the largest")
    console.facts({"path": str(out), "difference": difference})


def evaluate(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: console.EvalOverrides = None,
    dry_run: DryRun = False,
    all_: Annotated[bool, typer.Option("--all", help="Also show every measure after every hop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure base, prompts, trained policies and baselines on held-out questions."""
    from leret.config.evaluation import EvalRecipe
    from leret.config.load import load_recipe
    from leret.core.runs import Run

    settings = load_recipe(recipe, EvalRecipe, overrides or ())
    opened = Run.open(run)
    sampling = opened.section("sampling", "leret sample RECIPE")
    console.warn_of_demo(sampling["data"]["kind"], sampling["policy"]["model"])
    from leret.evaluation.plan import estimate  # after the recipe is read: a mistake in it is told at once
    from leret.evaluation.stage import evaluate as stage

    if dry_run:
        console.facts(estimate(settings, opened))
        return
    with shown() as progress:
        report = stage(settings, opened, progress=progress)
    show(report, by_hop=all_)


def answer(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="An eval_seed*.jsonl, or a directory: all below it.")],
    policy: Annotated[
        str,
        typer.Option(help="The reader: a model, or settings as in a recipe, {kind: openai, urls: [...], model: M}."),
    ],
    task: Annotated[
        str | None, typer.Option(help="Whose prompt: qa1 ... qa5, questions.", show_default="by the ids")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Let a reader LM answer from what was picked, by the logs that `leret eval` writes; EM and F1."""
    import asyncio

    from leret.config.load import flag_recipe
    from leret.core.yaml import parse
    from leret.evaluation.answers import answer as stage
    from leret.evaluation.answers import logs
    from leret.policies.load import make_policy, probe
    from leret.policies.reader import ReaderLM

    value = parse(policy, "--policy").value if policy.lstrip().startswith("{") else {"model": policy}
    settings = flag_recipe({"data": {"kind": "world"}, "policy": value}, {"policy": "--policy"}).policy
    files = logs(log)

    async def all_of_them() -> list[dict[str, Any]]:
        await probe(settings)
        opened = make_policy(settings)
        try:
            with shown() as progress:
                return [await stage(file, ReaderLM(opened, task, max_tokens), progress) for file in files]
        finally:
            await opened.aclose()

    found = asyncio.run(all_of_them())
    columns = ("log", "n", "answer EM", "answer F1", "fact EM", "fact F1")
    names = ("answer_em", "answer_f1", "em", "f1")
    rows = [(r["log"], str(r["n"]), *("-" if r[n] is None else f"{r[n]:.3f}" for n in names)) for r in found]
    console.table(columns, rows, values={"logs": found})


def show(report: EvalReport, by_hop: bool = False) -> None:
    """The table of an evaluation, and where the rest is."""
    from leret.evaluation.summary import headline, table_by_hop
    from leret.evaluation.summary import table as cells

    summary = report.summary
    if "sweep" in summary:
        from leret.evaluation.summary import sweep_table

        console.table(*sweep_table(summary["sweep"]), "by the sentences of a task", values=summary["sweep"])
        console.done(f"{report.path}  {report.page}")
        return
    title = f"{summary['n_questions']:,} held-out questions, after hop {summary['n_hops']}"
    console.table(*cells(summary), title, values=summary)
    for note in summary.get("notes", ()):
        console.complain(note, "note: ")
    if told := headline(summary):
        console.say(told)
    if by_hop:
        console.table(*table_by_hop(summary), "after every hop")
    if report.already:
        console.say("nothing to do: all of it had been evaluated")
    console.done(f"{report.path}  {report.page}")


def run(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE", help="Of sampling, of training, of evaluation; or one of all.")
    ],
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="The run.", show_default="runs/RECIPE")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Each samples its own part of the questions from what the last one trained.")
    ] = 1,
    serve: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option(help="Sample through a server of each round's policy, started here.", show_default="no server"),
    ] = None,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Sample, train and evaluate, in as many rounds as wanted, by recipes of each or by one that holds them all."""
    from leret.config.load import load_all
    from leret.config.sampling import SamplingRecipe
    from leret.core.runs import Run
    from leret.optimize.rounds import run_stage, schedule

    loaded = load_all(recipes, (overrides or []) + ["data.skip_invalid=true"] * skip_invalid, console.known_names())
    for recipe in loaded:
        if isinstance(recipe, SamplingRecipe):
            console.warn_of_demo(recipe.data.kind, recipe.policy.model)
    path = run or Path("runs") / Path(recipes[0]).stem
    steps = schedule(loaded, Run(path), rounds)
    if dry_run:
        console.facts({str(n): step.title for n, step in enumerate(steps, 1)})
        return
    opened = Run.create(path)
    for step in steps:
        console.done(step.title)
        with shown() as progress:
            report = run_stage(step, opened, serve=serve, progress=progress)
        if step.stage == "eval" and report is not None:
            show(cast("EvalReport", report))
        elif report is not None:
            console.facts(report)
