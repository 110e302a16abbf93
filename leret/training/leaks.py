"""No question is both trained on and evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leret.datasets.load import load_questions, split_name
from leret.datasets.splits import refuse_doubles, refuse_leak, split_of
from leret.errors import DataError, TrainingError
from leret.runs import Run
from leret.training.examples import Example
from leret.types import Question

__all__ = ["refuse_leaks"]


def refuse_leaks(run: Run, examples: Sequence[Example]) -> None:
    """Refuse examples of questions that evaluation holds back, by their ids or their texts.

    Args:
        run: its data settings say how the questions are split.
        examples: what would be trained on.

    Raises:
        TrainingError: an example's question is held out.
    """
    data = (run.manifest().get("sampling") or {}).get("data") or {}
    ids, seed = {example.question_id for example in examples}, int(data.get("seed", 0))
    try:
        questions = _questions(data, seed)
        test = [question for question in questions if split_name(question, seed) == "test"]
        hashed = {id for id in ids if split_of(id, seed) == "test"}
        refuse_leak(ids, {question.id for question in test} if questions else hashed)
        refuse_doubles((question for question in questions if question.id in ids), test)
    except DataError as error:
        raise TrainingError(str(error)) from error


def _questions(data: Mapping[str, Any], seed: int) -> Sequence[Question]:
    """All of the run's data; none where their file is not on this machine, and the hash of an id tells its split."""
    kind, source = data.get("kind"), str(data.get("questions"))
    if kind not in {"beir", "world"} and not source.startswith("hf:") and not Path(source).exists():
        return ()
    return load_questions(str(kind), source, seed=seed, skip_bad=True, options=data.get("options")).items
