"""`leret demo`: the whole loop on a generated world with the shipped policy, from the recipes that anyone can edit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.training.algorithms import TrainingRecipe

if TYPE_CHECKING:
    from leret.evaluation.stage import EvalReport


TRAININGS = ("demo-sft", "demo-ipo", "demo-sft-more", "demo-grpo")
"""Training recipes, in order: the control takes as many steps as the two before it; the last one samples afresh."""


def demo(out: Path, seed: int = 0, progress: Progress | None = None) -> EvalReport:
    """Sample, train and evaluate; a demo that was stopped goes on.

    Args:
        out: run directory.
        seed: of the world, the samples and the trainings.
        progress: shown while it works.
    """
    from leret.evaluation.stage import evaluate
    from leret.sampling.stage import sample
    from leret.training.stage import train

    progress = progress or Silent()
    run = Run.create(out)
    seeds = [f"data.seed={seed}", f"sampling.seed={seed}"]
    sample(load_recipe("sampling/demo.yaml", SamplingRecipe, seeds), run, base_dir=Path.cwd(), progress=progress)
    for name in TRAININGS:
        recipe = load_recipe(f"training/{name}.yaml", TrainingRecipe, [f"seed={seed}"])
        train(recipe, run, progress=progress)
    return evaluate(load_recipe("eval/demo.yaml", EvalRecipe, [f"seed={seed}"]), run, progress=progress)
