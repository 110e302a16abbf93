"""Build a policy: ``python -m models demo --out policies/demo``, or ``python -m models pretrain RECIPE``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from leret.core.progress import shown

BUILDERS = {
    "demo": "models.scratch:pretrain_scratch",
    "agent": "models.agent:pretrain_agent",
    "english": "models.english:pretrain_english",
    "smollm2": "models.smollm2:build_smollm2",
}
"""Functions that build a policy; imported when they are called."""


def main(arguments: list[str] | None = None) -> None:
    """Build the policy named on the command line."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["pretrain"]:
        from models.pretrain.command import run

        run(words[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m models",
        description=__doc__,
        epilog="`python -m models pretrain` builds the policy of a sampling recipe and has arguments of its own: see "
        "`python -m models pretrain --help`.",
    )
    parser.add_argument("name", choices=BUILDERS)
    parser.add_argument(
        "--out", type=Path, help="model directory, by default policies/NAME; a stopped build is continued"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="training steps; defaults to the shipped policy's")
    parser.add_argument("--set", action="append", help="for english: data.questions=FILE and data.corpus=FILE")
    parsed = parser.parse_args(words)
    out = parsed.out or Path("policies") / parsed.name
    options = {"overrides": parsed.set} if parsed.set else {}
    module, _, function = BUILDERS[parsed.name].partition(":")
    build = getattr(import_module(module), function)
    with shown() as progress:
        progress.start(f"building {out.name}", parsed.steps)
        build(out, progress, seed=parsed.seed, steps=parsed.steps, **options)
        progress.finish()


if __name__ == "__main__":
    main()
