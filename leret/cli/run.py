"""``leret train``, ``leret merge``, ``leret eval``, and ``leret run`` for the whole loop."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from leret.cli import console
from leret.cli.console import DryRun, NewRunOption, Overrides, RecipeArgument, RunOption
from leret.core.bundled import ROOT
from leret.core.errors import ConfigError
from leret.core.progress import shown

_STAGE = re.compile(r"^(train|eval):", re.MULTILINE)
"""Sections of a file that describes a whole run."""

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


def train(
    context: typer.Context,
    recipe: RecipeArgument,
    run: RunOption,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Train in several processes: fsdp, zero3, multi, a file, or accelerate (your own config).",
        ),
    ] = None,
) -> None:
    """Train a policy on a run's samples (sft, dpo, ipo, kto) or on new samples (grpo, rloo, ppo)."""
    from leret.config.load import flag_settings, load_recipe
    from leret.core.classes import is_path
    from leret.core.runs import Run
    from leret.training.algorithms import TrainingRecipe

    if is_path(recipe):
        settings = flag_settings(
            TrainingRecipe, {"algorithm": recipe}, {"algorithm": "RECIPE"}, overrides or ()
        )
    else:
        settings = load_recipe(recipe, TrainingRecipe, overrides or ())
    directory = Run.open(run)
    directory.sampling()
    from leret.training import stage  # slow to import, so check the recipe first
    from leret.training.processes import refuse_processes

    if launch is not None:
        refuse_processes(settings)
    if dry_run:
        return console.facts(stage.estimate(settings, directory))
    if launch is not None:
        launcher = _launched(launch)
        # Raise errors of the recipe once, before the processes start.
        stage.estimate(settings, directory)
        flags = [f"--{name}" for name in ("debug", "json") if context.find_root().params.get(name)]
        changes = [f"--set={override}" for override in overrides or ()]
        words = ["train", recipe, "--run", str(run), *changes]
        raise typer.Exit(_run_launcher([*launcher, *flags, *words]))
    first = os.environ.get("RANK", "0") == "0"  # only the first process prints
    with shown() as progress:
        report = stage.train(settings, directory, progress=progress if first else None)
    if first:
        if report.already:
            console.done(f"nothing to do: {report.path} is complete")
        else:
            console.done(f"trained {report.path}")
        console.facts(report)
        if settings.folder == "policies" and not is_path(recipe):
            console.next_command("eval", recipe, run)


def _launched(config: str) -> list[str]:
    """Return the command to launch leret with an accelerate config; "accelerate" means the user's default config."""
    shipped = ROOT / "training/accelerate"
    file = shipped / f"{config}.yaml"
    if not file.is_file():
        file = Path(config)
    if config != "accelerate" and not file.is_file():
        names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
        raise ConfigError(
            f"--launch {config}: unknown accelerate config; choose a file, {names}, "
            "or accelerate (the default from `accelerate config`)"
        )
    options = [] if config == "accelerate" else ["--config_file", str(file)]
    return [sys.executable, "-m", "leret.training.processes", *options, "-m", "leret"]


def _run_launcher(command: list[str]) -> int:
    """Run a launcher and return its exit code; raise KeyboardInterrupt after a signal.

    The launcher runs in a new session, so that it gets each signal once. Its processes save a checkpoint and stop.
    """
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}  # seconds
    received: list[int] = []
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:

        def forward(number: int, _: Any) -> None:
            received.append(number)
            process.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, forward) for number in numbers}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
    return code


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Directory of a trained adapter.")
    ],
    out: Annotated[Path, console.output_directory("Directory for the merged model, in float32.")],
) -> None:
    """Merge a LoRA adapter into its base model, and compare logits before and after."""
    from leret.policies.checkpoints import find_model
    from leret.policies.serving.model import write_merged

    if out.exists():
        raise ConfigError(f"--out {out} already exists; choose another directory")
    difference = write_merged(find_model(adapter), out)
    console.done(
        f"merged into {out}; maximum logit difference: {difference:.1e} of the maximum logit"
    )
    console.facts({"path": str(out), "difference": difference})


def evaluate(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Evaluate the base model, prompts, trained policies and baselines on held-out questions."""
    from leret.config.evaluation import EvalRecipe
    from leret.config.load import load_recipe
    from leret.core.runs import Run

    settings = load_recipe(recipe, EvalRecipe, overrides or ())
    directory = Run.open(run)
    sampling = directory.sampling()
    console.warn_of_scope(
        sampling["policy"]["model"], sampling["data"]["kind"], sampling["program"]["path"]
    )
    from leret.evaluation.plan import estimate  # slow to import, so check the recipe first
    from leret.evaluation.stage import evaluate as stage
    from leret.viewer.report import write_report

    if dry_run:
        return console.facts(estimate(settings, directory))
    with shown() as progress:
        report = stage(settings, directory, progress=progress, report=write_report)
    show(report)
    console.say(f"next:\n  leret view {shlex.quote(str(run))}")


def show(report: EvalReport) -> None:
    """Print an evaluation's table, headline and file paths."""
    from leret.config.evaluation import label
    from leret.evaluation.summary import headline, table

    summary = report.summary
    title = f"{summary['n_questions']:,} held-out questions, after hop {summary['n_hops']}"
    console.table(*table(summary), title, values=summary)
    for note in summary.get("notes", ()):
        console.complain(note, "note: ")
    sentence = headline(summary)
    if sentence:
        console.say(label(sentence))
    if "leaks" in summary:
        console.say(summary["leaks"]["verdict"])
    if report.already:
        console.say("nothing to do: all systems are already evaluated")
    console.done(f"{report.path}  {report.page}")


def run(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE",
            help="Sampling, training and evaluation recipes, or one file with all.",
        ),
    ],
    run: NewRunOption = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of rounds. Each round samples part of the questions with the latest policy.",
        ),
    ] = 1,
    serve: Annotated[
        Literal["vllm"] | None,
        typer.Option(
            help="Serve each round's policy with this engine for sampling.",
            show_default="no server",
        ),
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Sample, train and evaluate, in one or more rounds. One sampling recipe takes the other recipes of its name."""
    from leret.config.load import load_all
    from leret.config.sampling import SamplingRecipe
    from leret.core.runs import Run
    from leret.optimize.rounds import run_stage, schedule

    recipes = _with_same_name(recipes)
    loaded = load_all(recipes, overrides or (), console.known_names())
    for recipe in (recipe for recipe in loaded if isinstance(recipe, SamplingRecipe)):
        console.warn_of_scope(recipe.policy.model, recipe.data.kind, recipe.program.path)
    path = console.run_path(run, recipes[0])
    steps = schedule(loaded, Run(path), rounds)
    if dry_run:
        return console.facts({str(n): step.title for n, step in enumerate(steps, 1)})
    directory = Run.create(path)
    for step in steps:
        console.done(step.title)
        with shown() as progress:
            report = run_stage(step, directory, serve=serve, progress=progress)
        if step.stage == "eval" and report is not None:
            show(cast("EvalReport", report))
        elif report is not None:
            console.facts(report)
    if all(isinstance(recipe, SamplingRecipe) for recipe in loaded):
        console.complain("only sampled, because no training recipe was named", label="note: ")
        console.next_command("train", recipes[0], path)


def _with_same_name(recipes: list[str]) -> list[str]:
    """Return a single sampling recipe with the training and evaluation recipes of its name, if one for training exists.

    A file with a section ``train`` or ``eval`` describes its whole run, so it stays alone.
    """
    from leret.config.load import find_recipe

    if len(recipes) > 1:
        return recipes
    file = find_recipe(recipes[0], "sampling", "training", "eval")
    training, evaluation = (
        file.parent.parent / stage / file.name for stage in ("training", "eval")
    )
    if (
        file.parent.name != "sampling"
        or not training.is_file()
        or _STAGE.search(file.read_text(encoding="utf-8"))
    ):
        return recipes
    return [recipes[0], str(training), *([str(evaluation)] if evaluation.is_file() else [])]
