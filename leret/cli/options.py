"""Arguments and flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leret.cli.console import as_json


def _set(example: str) -> Any:
    return typer.Option("--set", metavar="KEY=VALUE", help=f"Override a key: {example}. Repeatable.")


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
RunOption = Annotated[Path, typer.Option("--run", metavar="DIR", help="The run directory.")]
Overrides = Annotated[list[str] | None, _set("sampling.samples=2")]
TrainingOverrides = Annotated[list[str] | None, _set("learning_rate=1e-6")]
DataOverrides = Annotated[list[str] | None, _set("data.split=dev")]
EvalOverrides = Annotated[list[str] | None, _set("limit=100")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it costs; do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", callback=as_json, help="Print one JSON object alone.")]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave out bad lines of the data, and count them.")]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="Of the data: jsonl, beir, hotpotqa, hover, musique, 2wiki; jsonl if not given."),
]
IndexOrUrl = Annotated[str, typer.Argument(metavar="INDEX", help="An index directory, or the URL of a server.")]
TokenEnv = Annotated[str | None, typer.Option("--token-env", metavar="VAR", help="Variable with the server's token.")]
