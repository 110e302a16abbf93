"""``leret pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leret.cli.options import Overrides, RecipeArgument, SkipInvalid


def pretrain(
    recipe: RecipeArgument,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Model directory; default policy.model.")] = None,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Build a small policy from gold-blind demonstrations; goes on where it was stopped."""
    from leret.cli.console import done
    from leret.cli.progress import shown
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe
    from leret.demo.pretrain.stage import pretrain as stage

    given = (overrides or []) + ["data.skip_invalid=true"] * skip_invalid
    settings = load_recipe(recipe, SamplingRecipe, given, optional=("policy.model",))
    with shown() as progress:
        path = stage(settings, out, progress=progress)
    done(f"a policy in {path}")
