"""``leret train``."""

from __future__ import annotations

from leret.cli.options import AsJson, DryRun, RecipeArgument, RunOption, TrainingOverrides


def train(
    recipe: RecipeArgument,
    run: RunOption,
    overrides: TrainingOverrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train the policy on a run's samples: sft, dpo or ipo."""
    from leret.cli.console import done, facts
    from leret.cli.progress import shown
    from leret.config.load import load_recipe
    from leret.core.runs import Run
    from leret.training.algorithms import TrainingRecipe

    settings = load_recipe(recipe, TrainingRecipe, overrides or ())
    opened = Run.open(run)
    opened.section("sampling", "leret sample RECIPE")
    from leret.training import stage  # after the recipe is read: a mistake in it is told at once

    if dry_run:
        facts(stage.plan(settings, opened))
        return
    with shown() as progress:
        report = stage.train(settings, opened, progress=progress)
    done(f"nothing to do: {report.path} is there" if report.already else f"trained {report.path}")
    facts(report)
