"""No question is both trained on and evaluated on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from leret.datasets.load import load_questions, split_name
from leret.datasets.splits import refuse_leak, split_of
from leret.errors import DataError, TrainingError
from leret.runs import Run
from leret.training.examples import Example

__all__ = ["refuse_leaks"]


def refuse_leaks(run: Run, examples: Sequence[Example], held_out: Collection[str]) -> None:
    """Refuse examples of questions that evaluation holds back.

    Args:
        run: its data settings say how the questions are split.
        examples: what would be trained on.
        held_out: ids of more evaluation questions.

    Raises:
        TrainingError: an example's question is held out.
    """
    data = (run.manifest().get("sampling") or {}).get("data") or {}
    ids = {example.question_id for example in examples}
    try:
        refuse_leak(ids, _test_ids(data, ids) | set(held_out))
    except DataError as error:
        raise TrainingError(str(error)) from error


def _test_ids(data: Mapping[str, Any], ids: Collection[str]) -> set[str]:
    """The ids that the run's data have in their test split: by hash, unless the data bring splits of their own."""
    kind, source, seed = data.get("kind"), data.get("questions"), int(data.get("seed", 0))
    if kind not in {"beir", "world"} and not str(source).startswith("hf:"):
        return {id for id in ids if split_of(id, seed) == "test"}
    questions = load_questions(str(kind), source, seed=seed, skip_bad=True, options=data.get("options"))
    return {question.id for question in questions if split_name(question, seed) == "test"}
