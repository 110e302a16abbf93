"""``leret train``, ``leret eval`` and ``leret run``, the whole loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipInvalid
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


def train(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: console.TrainingOverrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train the policy on a run's samples (sft, dpo, ipo) or on fresh ones (grpo, rloo, ppo)."""
    from leret.config.load import load_recipe
    from leret.core.runs import Run
    from leret.training.algorithms import TrainingRecipe

    settings = load_recipe(recipe, TrainingRecipe, overrides or ())
    opened = Run.open(run)
    opened.section("sampling", "leret sample RECIPE")
    from leret.training import stage  # after the recipe is read: a mistake in it is told at once

    if dry_run:
        console.facts(stage.plan(settings, opened))
        return
    with shown() as progress:
        report = stage.train(settings, opened, progress=progress)
    console.done(f"nothing to do: {report.path} is there" if report.already else f"trained {report.path}")
    console.facts(report)


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
    from leret.evaluation.plan import plan  # after the recipe is read: a mistake in it is told at once
    from leret.evaluation.stage import evaluate as stage

    if dry_run:
        console.facts(plan(settings, opened))
        return
    with shown() as progress:
        report = stage(settings, opened, progress=progress)
    show(report, by_hop=all_)


def show(report: EvalReport, by_hop: bool = False) -> None:
    """The table of an evaluation, and where the rest is."""
    from leret.evaluation.summary import table as cells
    from leret.evaluation.summary import table_by_hop

    summary = report.summary
    title = f"{summary['n_questions']:,} held-out questions, after hop {summary['n_hops']}"
    console.table(*cells(summary), title, values=summary)
    if by_hop:
        console.table(*table_by_hop(summary), "after every hop")
    if report.already:
        console.say("nothing to do: all of it had been evaluated")
    console.done(f"{report.path}  {report.page}")


def run(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE", help="Of sampling, of training, of evaluation.")],
    run: RunOption,
    rounds: Annotated[int, typer.Option(min=1, help="Each samples with what the last one trained.")] = 1,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Sample, train and evaluate, in as many rounds as wanted."""
    from leret.config.load import load_all
    from leret.config.sampling import SamplingRecipe
    from leret.core.runs import Run
    from leret.optimize.rounds import run_stage, schedule

    loaded = load_all(recipes, (overrides or []) + ["data.skip_invalid=true"] * skip_invalid, console.known_names())
    for recipe in loaded:
        if isinstance(recipe, SamplingRecipe):
            console.warn_of_demo(recipe.data.kind, recipe.policy.model)
    steps = schedule(loaded, Run(run), rounds)
    if dry_run:
        console.facts({str(n): step.title for n, step in enumerate(steps, 1)})
        return
    opened = Run.create(run)
    for step in steps:
        console.done(step.title)
        with shown() as progress:
            report = run_stage(step, opened, progress=progress)
        if step.stage == "eval" and report is not None:
            show(cast("EvalReport", report))
        elif report is not None:
            console.facts(report)
