"""``leret sample`` and ``leret pairs``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from leret.cli.options import AsJson, DryRun, Overrides, RecipeArgument, RunOption, SkipBad
