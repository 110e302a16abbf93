"""`leret demo`: run the shipped recipes with the shipped policy on a generated world."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
"""Training recipes, in order.

demo-sft-more is a control with as many steps as the two recipes before it together.
"""
_OF_SFT = 2  # the first two stages, sampling and demo-sft, are needed by all others
_STOP_S = 30.0


def demo(out: Path, seed: int = 0, progress: Progress | None = None) -> EvalReport:
    """Sample, train and evaluate in the run directory ``out``, or continue a stopped demo there."""
    from leret.optimize.rounds import Recipe, run_stage, schedule

    recipes: list[Recipe] = [
        load_recipe(
            "sampling/demo.yaml", SamplingRecipe, [f"data.seed={seed}", f"sampling.seed={seed}"]
        ),
        *(
            load_recipe(f"training/{name}.yaml", TrainingRecipe, [f"seed={seed}"])
            for name in TRAININGS
        ),
        load_recipe("eval/demo.yaml", EvalRecipe, [f"seed={seed}"]),
    ]
    run = Run.create(out)
    stages = schedule(recipes, run)
    for stage in stages[:_OF_SFT]:
        run_stage(stage, run, progress=progress)
    with nullcontext() if (run.policies / "grpo").is_dir() else _beside(run, seed):
        for stage in stages[_OF_SFT:-2]:
            run_stage(stage, run, progress=progress)
    # These stages have run in the other process. If it failed, they run again; if not, their
    # results are read.
    *_, report = [run_stage(stage, run, progress=progress) for stage in stages[-2:]]
    return cast("EvalReport", report)


@contextmanager
def _beside(run: Run, seed: int) -> Iterator[None]:
    """Run the last training recipe and the evaluation in another process.

    Leaving the block waits for the process.
    """
    from leret.http.endpoints import ApiKey
    from leret.policies.serving.process import ServerProcess

    recipes = [f"training/{TRAININGS[-1]}.yaml", "eval/demo.yaml"]
    seeds = ["--set", f"train.seed={seed}", "--set", f"eval.seed={seed}"]
    words = ["run", *recipes, "--run", str(run.path), *seeds]
    log = run.cache / f"{TRAININGS[-1]}.log"
    process = ServerProcess([sys.executable, "-m", "leret", *words], os.environ, log, ApiKey())
    try:
        yield
        while process.exit_code() is None:
            time.sleep(0.1)
    finally:
        process.stop(_STOP_S)  # time to save a checkpoint
