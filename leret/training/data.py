"""What is trained on, read from the run: one completion a prompt (SFT), or a better and a worse one (DPO, IPO)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.core.errors import DataError, TrainingError
from leret.core.runs import Run
from leret.core.types import Task
from leret.datasets.load import load_questions, split_name
from leret.datasets.splits import refuse_doubles, refuse_leak, split_of
from leret.policies.base import Messages

_COLUMNS = ("prompt", "chosen", "rejected", "question_id")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its completions: the target alone (SFT), or the chosen and the rejected one, in this order."""

    question_id: str
    prompt: Messages
    completions: tuple[str, ...]


def read_preferences(directory: Path) -> list[Example]:
    """The pairs of ``R/preferences/train.parquet``, in its order.

    Raises:
        TrainingError: there is no such file, it is not Parquet, it lacks a column, or it holds no pair.
    """
    import pyarrow
    import pyarrow.parquet

    path = directory / "train.parquet"
    if not path.is_file():
        raise TrainingError(f"{path} is missing; `leret sample` writes it, `leret pairs` rebuilds it")
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise TrainingError(f"{path} cannot be read ({error}); `leret pairs` rebuilds it without sampling") from error
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise TrainingError(
            f"{path} has no column {', '.join(missing)} (it has {', '.join(table.column_names)}); "
            "`leret pairs` rebuilds it"
        )
    rows = table.select(list(_COLUMNS)).to_pylist()
    if not rows:
        raise TrainingError(
            f"{path} holds no pair: at no state did two different completions differ in reward. Sample more "
            "questions, more prompts or samples a state, or at a higher temperature"
        )
    return [_preference(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def read_targets(targets: Iterable[Mapping[str, Any]]) -> list[Example]:
    """SFT examples from what `leret.sampling.preferences.sft_targets.sft_targets` gives.

    Raises:
        TrainingError: there is none.
    """
    examples = [
        Example(str(row["question_id"]), tuple(dict(message) for message in row["prompt"]), (str(row["completion"]),))
        for row in targets
    ]
    if not examples:
        raise TrainingError(
            "the run has no target for SFT: no state whose samples differ in reward. Sample more questions, more "
            "prompts or samples a state, or set only_spread: false to train on every state"
        )
    return examples


def examples_digest(examples: Sequence[Example]) -> str:
    """Names what is trained on: the prompts and completions in order."""
    name = hashlib.blake2b(digest_size=16)
    for example in examples:
        row = json.dumps([example.question_id, example.prompt, example.completions], sort_keys=True)
        name.update(row.encode())
        name.update(b"\n")
    return name.hexdigest()


def _preference(row: Mapping[str, Any], place: str) -> Example:
    try:
        prompt = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in row["prompt"])
        completions = (_content(row["chosen"]), _content(row["rejected"]))
    except (KeyError, TypeError, IndexError) as error:
        raise TrainingError(
            f"{place}: prompt, chosen and rejected must be lists of messages with role and content; "
            "`leret pairs` rebuilds the file"
        ) from error
    return Example(str(row["question_id"]), prompt, completions)


def _content(messages: Sequence[Mapping[str, str]]) -> str:
    return str(messages[0]["content"])


pass


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


def _questions(data: Mapping[str, Any], seed: int) -> Sequence[Task]:
    """All of the run's data; none where their file is not on this machine, and the hash of an id tells its split."""
    kind, source = data.get("kind"), str(data.get("questions"))
    if kind not in {"beir", "world"} and not source.startswith("hf:") and not Path(source).exists():
        return ()
    return load_questions(str(kind), source, seed=seed, skip_invalid=True, options=data.get("options")).items
