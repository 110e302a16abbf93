"""Build a policy: ``python -m models demo --out policies/demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from leret.core.progress import shown
from models.agent import pretrain_agent
from models.english import pretrain_english
from models.scratch import pretrain_scratch
from models.smollm2 import build_smollm2

BUILDERS = {"demo": pretrain_scratch, "agent": pretrain_agent, "english": pretrain_english, "smollm2": build_smollm2}


def main(arguments: list[str] | None = None) -> None:
    """Build the policy named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__)
    parser.add_argument("name", choices=BUILDERS)
    parser.add_argument(
        "--out", type=Path, help="model directory, by default policies/NAME; a stopped build is continued"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="training steps; defaults to the shipped policy's")
    parser.add_argument("--set", action="append", help="for english: data.questions=FILE and data.corpus=FILE")
    parsed = parser.parse_args(arguments)
    out = parsed.out or Path("policies") / parsed.name
    options = {"overrides": parsed.set} if parsed.set else {}
    with shown() as progress:
        progress.start(f"building {out.name}", parsed.steps)
        BUILDERS[parsed.name](out, progress, seed=parsed.seed, steps=parsed.steps, **options)
        progress.finish()


if __name__ == "__main__":
    main()
