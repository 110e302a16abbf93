"""``leret run``: the whole loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from leret.cli.options import AsJson, DryRun, Overrides, RunOption, SkipInvalid

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


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
    from leret.cli.console import done, facts, warn_of_demo
    from leret.cli.evaluate import show
    from leret.cli.progress import shown
    from leret.config.load import load_all
    from leret.config.sampling import SamplingRecipe
    from leret.core.runs import Run
    from leret.optimize.rounds import run_stage, schedule

    loaded = load_all(recipes, (overrides or []) + ["data.skip_invalid=true"] * skip_invalid)
    for recipe in loaded:
        if isinstance(recipe, SamplingRecipe):
            warn_of_demo(recipe.data.kind, recipe.policy.model)
    steps = schedule(loaded, Run(run), rounds)
    if dry_run:
        facts({str(n): step.title for n, step in enumerate(steps, 1)})
        return
    opened = Run.create(run)
    for step in steps:
        done(step.title)
        with shown() as progress:
            report = run_stage(step, opened, progress=progress)
        if step.stage == "eval" and report is not None:
            show(cast("EvalReport", report))
        elif report is not None:
            facts(report)
