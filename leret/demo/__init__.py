"""`leret demo`: the whole loop on a generated world with the shipped policy, from the recipes that anyone can edit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.training.algorithms import TrainingRecipe

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


TRAININGS = ("demo-sft", "demo-ipo", "demo-sft-more", "demo-grpo")
"""Training recipes, in order: the control takes as many steps as the two before it; the last one samples afresh."""
_OF_SFT = 2
"""Stages that the others build on: sampling, and imitation."""


def demo(out: Path, seed: int = 0, progress: Progress | None = None) -> EvalReport:
    """Sample, train and evaluate; a demo that was stopped goes on.

    Args:
        out: run directory.
        seed: of the world, the samples and the trainings.
        progress: shown while it works.
    """
    from leret.optimize.rounds import Recipe, run_stage, schedule

    recipes: list[Recipe] = [
        load_recipe("sampling/demo.yaml", SamplingRecipe, [f"data.seed={seed}", f"sampling.seed={seed}"]),
        *(load_recipe(f"training/{name}.yaml", TrainingRecipe, [f"seed={seed}"]) for name in TRAININGS),
        load_recipe("eval/demo.yaml", EvalRecipe, [f"seed={seed}"]),
    ]
    run = Run.create(out)
    stages = schedule(recipes, run)
    for stage in stages[:_OF_SFT]:
        run_stage(stage, run, progress=progress)
    with _beside("train", f"training/{TRAININGS[-1]}.yaml", "--run", str(out), "--set", f"seed={seed}"):
        for stage in stages[_OF_SFT:-2]:
            run_stage(stage, run, progress=progress)
    *_, report = [run_stage(stage, run, progress=progress) for stage in stages[-2:]]  # goes on if the other failed
    return cast("EvalReport", report)


@contextmanager
def _beside(*words: str) -> Iterator[None]:
    """Run a command of leret on the second core while the block runs; both have ended after it."""
    command = [sys.executable, "-m", "leret", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        except BaseException:
            process.terminate()  # it saves a checkpoint
            process.wait()
            raise
