"""`leret answer`: a reader answers from what was picked, over the lines of `leret.evaluation.episodes`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leret.core.aio import for_each
from leret.core.errors import DataError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.types import digest
from leret.evaluation.statistics import bootstrap_intervals, json_number, nan_mean
from leret.policies.reader import ReaderLM, score

_SUFFIX = ".answers.jsonl"
CONCURRENCY = 64
"""Questions in flight."""


def logs(path: Path) -> list[Path]:
    """The file, or every ``eval_seed*.jsonl`` below a directory; DataError where there is none."""
    found = [path] if path.is_file() else sorted(path.rglob("eval_seed*.jsonl"))
    found = [file for file in found if not file.name.endswith(_SUFFIX)]
    if not found:
        raise DataError(f"{path}: no log of picks; name an eval_seed*.jsonl, or a directory of `leret eval` with some")
    return found


async def answer(path: Path, reader: ReaderLM, progress: Progress) -> dict[str, Any]:
    """Answer every line of a log, and write NAME.answers.jsonl beside it.

    Each line there has ``prediction``, ``answer_em`` and ``answer_f1`` beside. What the same reader has answered before
    from the same texts is not asked again; what is done when it is stopped, or the policy fails, is kept.

    Returns:
        ``log``, ``n``, and means with intervals: ``answer_em``, ``answer_f1``, and of the facts ``em`` and ``f1``.
    """
    lines, out = read(path), path.with_name(path.name.removesuffix(".jsonl") + _SUFFIX)
    before = {line["reader"]: line["prediction"] for line in read(out)} if out.is_file() else {}
    asked = [(line["id"], line["question"], line["texts"]) for line in lines]
    keys = [digest(reader.policy.digest, reader.max_tokens, list(reader.messages(*one))) for one in asked]
    predictions = {place: before[key] for place, key in enumerate(keys) if key in before}
    progress.start(f"answering {path.name}", len(lines) - len(predictions))

    async def one(place: int) -> None:
        predictions[place] = await reader.answer(*asked[place])
        progress.advance(1)

    try:
        await for_each([place for place in range(len(lines)) if place not in predictions], one, CONCURRENCY)
    finally:
        done = [_scored(lines[place], predictions[place], keys[place]) for place in sorted(predictions)]
        write_atomically(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in done))
        progress.finish()
    return {"log": str(path), "n": len(done), **_means(done)}


def _scored(line: Mapping[str, Any], prediction: str, key: str) -> dict[str, Any]:
    references = line.get("answers") or ([line["answer"]] if line["answer"] is not None else [])
    scores = {f"answer_{name}": score(prediction, references, name) if references else None for name in ("em", "f1")}
    return {**line, "prediction": prediction, **scores, "reader": key}


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; DataError where one lacks what a reader is asked with."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            missing = {"id", "question", "texts", "answer"} - line.keys()
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path}:{number}: no line of picks ({error}); `leret eval` writes them") from error
        if missing:
            raise DataError(f"{path}:{number}: {sorted(missing)[0]!r} is missing; `leret eval` writes such lines")
        found.append(line)
    return found


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("answer_em", "answer_f1", "em", "f1")
    values = np.array([[np.nan if line.get(n) is None else line[n] for n in names] for line in lines], dtype=float)
    found: dict[str, Any] = {}
    for name, mean, interval in zip(names, nan_mean(values), bootstrap_intervals(values).tolist(), strict=True):
        found[name] = json_number(mean)
        found[f"{name}_ci"] = None if found[name] is None else interval
    return found
