"""``leret demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leret.cli.options import AsJson, RunOption


def demo(
    run: RunOption = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the whole loop.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch a small language model learn to search: no GPU, no network, a few minutes."""
    from leret.cli.evaluate import show
    from leret.cli.progress import shown
    from leret.demo import demo as run_demo

    with shown() as progress:
        report = run_demo(run, seed=seed, progress=progress)
    show(report)
