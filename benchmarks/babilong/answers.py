"""Answer questions with a reader LM, from the picks in the logs of `episodes.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.babilong.reader import ReaderLM, score
from leret.core.aio import for_each
from leret.core.errors import DataError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.types import digest
from leret.evaluation.statistics import bootstrap_intervals, json_number, nan_mean

_SUFFIX = ".answers.jsonl"
CONCURRENCY = 64
"""Maximum number of questions in flight."""
MEASURES = ("answer_em", "answer_f1", "em", "f1")


def find_logs(path: Path) -> list[Path]:
    """Return the file itself, or every ``eval_seed*.jsonl`` below a directory; DataError if there is none."""
    files = [path] if path.is_file() else sorted(path.rglob("eval_seed*.jsonl"))
    logs = [file for file in files if not file.name.endswith(_SUFFIX)]
    if not logs:
        raise DataError(f"{path}: no log of picks; choose an eval_seed*.jsonl file, or a directory with such files")
    return logs


async def answer(path: Path, reader: ReaderLM, progress: Progress) -> dict[str, Any]:
    """Answer each line of a log, and write NAME.answers.jsonl next to the log.

    The output's lines add ``prediction``, ``answer_em`` and ``answer_f1``. Prompts that the same reader has answered
    before are not sent again. Finished answers are kept after an interruption or an outage.

    Returns:
        ``log``, ``n``, and the means of `MEASURES` with intervals. ``em`` and ``f1`` score the picked facts.
    """
    lines, out = read_log(path), path.with_name(path.name.removesuffix(".jsonl") + _SUFFIX)
    cache = {line["reader"]: line["prediction"] for line in read_log(out)} if out.is_file() else {}
    inputs = [(line["id"], line["question"], line["texts"]) for line in lines]
    keys = [digest(reader.policy.digest, reader.max_tokens, list(reader.messages(*each))) for each in inputs]
    predictions = {i: cache[key] for i, key in enumerate(keys) if key in cache}
    todo = [i for i in range(len(lines)) if i not in predictions]
    progress.start(f"answering {path.name}", len(todo))

    async def answer_line(i: int) -> None:
        predictions[i] = await reader.answer(*inputs[i])
        progress.advance(1)

    try:
        await for_each(todo, answer_line, CONCURRENCY)
    finally:
        done = [_scored(lines[i], predictions[i], keys[i]) for i in sorted(predictions)]
        write_atomically(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in done))
        progress.finish()
    return {"log": str(path), "n": len(done), **_means(done)}


def _scored(line: Mapping[str, Any], prediction: str, key: str) -> dict[str, Any]:
    references = line.get("answers") or ([line["answer"]] if line["answer"] is not None else [])
    scores = {f"answer_{name}": score(prediction, references, name) if references else None for name in ("em", "f1")}
    return {**line, "prediction": prediction, **scores, "reader": key}


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log. DataError if a line lacks a key that the reader needs."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            missing = {"id", "question", "texts", "answer"} - line.keys()
        except (ValueError, AttributeError) as error:
            raise DataError(
                f"{path}:{number}: not a line of picks ({error}); for the format see benchmarks/babilong/episodes.py"
            ) from error
        if missing:
            raise DataError(
                f"{path}:{number}: key {sorted(missing)[0]!r} is missing; see benchmarks/babilong/episodes.py"
            )
        lines.append(line)
    return lines


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = np.array([[np.nan if line.get(n) is None else line[n] for n in MEASURES] for line in lines], dtype=float)
    means: dict[str, Any] = {}
    for name, mean, interval in zip(MEASURES, nan_mean(values), bootstrap_intervals(values).tolist(), strict=True):
        means[name] = json_number(mean)
        means[f"{name}_ci"] = None if means[name] is None else interval
    return means
