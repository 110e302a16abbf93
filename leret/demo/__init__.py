"""A generated world of questions and documents, with a program and a metric for it, and `leret demo`.

The shipped policy ``demo`` knows the world's words.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dspy

from leret.core.progress import Progress
from leret.core.runs import Run
from leret.programs.search import Found, Search

if TYPE_CHECKING:
    from leret.retrieval.base import Retriever

TRAININGS = ("demo-sft", "demo-ipo", "demo-grpo")
"""Training recipes of `leret demo`, in order."""
_EVALUATION = "eval/demo.yaml"
_STOP_S = 30.0

logger = logging.getLogger("leret")


class ExampleData(NamedTuple):
    """DSPy examples, and a retriever over all documents.

    ``gold`` holds the ids of an example's relevant documents.
    """

    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    testset: list[dspy.Example]
    retriever: Retriever


def example_data(
    seed: int = 0, n_train: int = 150, n_val: int = 50, n_test: int = 150
) -> ExampleData:
    """Generate a world of invented people and works, in the words of the shipped policy ``demo``.

    Every question has two relevant documents. The text of the first document leads to the second.
    """
    from leret.config.retriever import BM25Settings
    from leret.core.files import cache_directory
    from leret.datasets.corpus import Corpus
    from leret.datasets.world.generate import generate
    from leret.retrieval.load import load_retriever

    documents, tasks = generate(seed, n_train, n_val, n_test, comparison=0)
    sets: dict[str, list[dspy.Example]] = {"train": [], "dev": [], "test": []}
    for task in tasks:
        example = dspy.Example(question=task.text, answer=task.answers[0], gold=list(task.gold))
        sets[str(task.split)].append(example.with_inputs("question"))
    retriever = load_retriever(BM25Settings(), Corpus(documents), cache_directory() / "example")
    return ExampleData(sets["train"], sets["dev"], sets["test"], retriever)


class MultiHop(dspy.Module):
    """Searches twice: the second query is written after reading the first passages."""

    def __init__(self) -> None:
        super().__init__()
        self.write_query = dspy.Predict("question, context: list[str] -> query")
        self.search = Search(k=3)

    def forward(self, question: str) -> dspy.Prediction:
        results = Found()
        for _ in range(2):
            query = self.write_query(question=question, context=results.passages).query
            results = self.search(query, results)
        return dspy.Prediction(context=results.passages, doc_ids=results.doc_ids)


def recall(
    example: dspy.Example, prediction: dspy.Prediction, trace: object | None = None
) -> float:
    """Return the share of the example's relevant documents that the program found; a DSPy metric."""
    return len(set(example.gold) & set(prediction.doc_ids)) / len(example.gold)


def run_demo(out: Path, seed: int = 0, progress: Progress | None = None) -> Any:
    """Sample, train and evaluate in the run directory ``out``, or continue a stopped demo there.

    Return the report of the evaluation.
    """
    from leret.config.evaluation import EvalRecipe
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe
    from leret.evaluation.stage import evaluate
    from leret.optimize.rounds import Recipe, run_stage, schedule
    from leret.training.algorithms import TrainingRecipe

    sampling = [f"data.seed={seed}", f"sampling.seed={seed}"]
    trainings = [
        load_recipe(f"training/{name}.yaml", TrainingRecipe, [f"seed={seed}"]) for name in TRAININGS
    ]
    evaluation = load_recipe(_EVALUATION, EvalRecipe, [f"seed={seed}"])
    recipes: list[Recipe] = [
        load_recipe("sampling/demo.yaml", SamplingRecipe, sampling),
        *trainings,
        evaluation,
    ]
    run = Run.create(out)
    stages = schedule(recipes, run)
    sft, ipo, grpo = [recipe.policy_name for recipe in trainings]
    if not (run.policies / grpo).is_dir():
        run_stage(stages[0], run, progress=progress)
        untrained = [name for name in evaluation.systems if name != "policies"]
        with _beside(run, seed, untrained):
            run_stage(stages[1], run, progress=progress)
            with _beside(run, seed, [grpo], f"training/{TRAININGS[-1]}.yaml"):
                run_stage(stages[2], run, progress=progress)
                stored = evaluation.model_copy(update={"systems": (sft, ipo)})
                evaluate(stored, run, progress=progress)
    # Finished stages only return their reports; stages that failed in another process run again.
    *_, report = [run_stage(stage, run, progress=progress) for stage in stages]
    return report


@contextmanager
def _beside(run: Run, seed: int, systems: Sequence[str], *trainings: str) -> Iterator[None]:
    """Run training recipes, and the evaluation of some systems, in another process.

    Leaving the block waits for the process; an exception stops it.
    """
    from leret.http.endpoints import ApiKey
    from leret.policies.serving.process import ServerProcess

    words = ["run", *trainings, _EVALUATION, "--run", str(run.path)]
    words += ["--set", f"eval.seed={seed}", "--set", f"eval.systems=[{','.join(systems)}]"]
    if trainings:
        words += ["--set", f"train.seed={seed}"]
    log = run.cache / f"demo-{systems[-1]}.log"
    process = ServerProcess([sys.executable, "-m", "leret", *words], os.environ, log, ApiKey())
    try:
        yield
        while process.exit_code() is None:
            time.sleep(0.1)
        if process.exit_code():
            logger.warning("a process beside the demo failed; %s says why", log)
    finally:
        process.stop(_STOP_S)  # time to save a checkpoint
