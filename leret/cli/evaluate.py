"""``leret eval``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leret.cli.options import AsJson, DryRun, EvalOverrides, RecipeArgument, RunOption

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


def evaluate(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: EvalOverrides = None,
    dry_run: DryRun = False,
    all_: Annotated[bool, typer.Option("--all", help="Also show every measure after every hop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure base, prompts, trained policies and baselines on held-out questions."""
    from leret.cli.console import facts, warn_of_demo
    from leret.cli.progress import shown
    from leret.config.evaluation import EvalRecipe
    from leret.config.load import load_recipe
    from leret.core.runs import Run

    settings = load_recipe(recipe, EvalRecipe, overrides or ())
    opened = Run.open(run)
    sampling = opened.section("sampling", "leret sample RECIPE")
    warn_of_demo(sampling["data"]["kind"], sampling["policy"]["model"])
    from leret.evaluation.plan import plan  # after the recipe is read: a mistake in it is told at once
    from leret.evaluation.stage import evaluate as stage

    if dry_run:
        facts(plan(settings, opened))
        return
    with shown() as progress:
        report = stage(settings, opened, progress=progress)
    show(report, by_hop=all_)


def show(report: EvalReport, by_hop: bool = False) -> None:
    """The table of an evaluation, and where the rest is."""
    from leret.cli.console import done, say, table
    from leret.evaluation.summary import table as cells
    from leret.evaluation.summary import table_by_hop

    summary = report.summary
    title = f"{summary['n_questions']:,} held-out questions, after hop {summary['n_hops']}"
    table(*cells(summary), title, values=summary)
    if by_hop:
        table(*table_by_hop(summary), "after every hop")
    if report.already:
        say("nothing to do: all of it had been evaluated")
    done(f"{report.path}  {report.page}")
