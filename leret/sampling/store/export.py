"""`leret store export`: a row a sample, as JSON lines or Parquet, read and written a piece at a time."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Literal

from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.sampling.store.check import open_unwritten
from leret.sampling.store.schema import run_error

Format = Literal["jsonl", "parquet"]

COLUMNS = {
    "id": "string", "question_id": "string", "step": "int64", "prompt": "string", "n": "int64",
    "messages": "messages", "completion": "string", "query": "string", "doc_ids": "strings", "scores": "floats",
    "reward": "float64", "recall": "float64", "error": "string", "error_message": "string",
    "prompt_tokens": "int64", "completion_tokens": "int64", "seed": "int64", "temperature": "float64",
    "top_p": "float64", "max_tokens": "int64", "state_id": "string", "predictor": "string", "chosen": "bool",
    "policy": "string", "policy_digest": "string", "prompt_digest": "string",
}  # fmt: skip
"""Columns of an export with their types; ``messages`` is there when it is asked for."""

_ROWS_A_GROUP = 5000
_SQL = (
    "SELECT s.*, t.predictor, t.messages, v.chosen IS s.id AS is_chosen FROM samples s JOIN states t "
    "ON t.id = s.state_id LEFT JOIN visits v ON (v.question_id, v.step, v.policy_digest) = "
    "(s.question_id, s.step, s.policy_digest) "
    "ORDER BY s.policy_digest, s.question_id, s.step, s.state_id, length(s.prompt), s.prompt, s.n"
)


def export_store(run: Run, to: Format, out: Path | IO[str], *, messages: bool = False, force: bool = False) -> int:
    """Write a run's samples, ordered by policy, question, step, prompt and index.

    Args:
        run: that was sampled; it may be sampled into meanwhile.
        to: ``jsonl`` or ``parquet``.
        out: a file, which appears whole or not at all; or an open text stream, for ``jsonl``.
        messages: add what the zero-shot prompt sends at the sample's state.
        force: replace a file that is there.

    Returns:
        The number of rows.

    Raises:
        ConfigError: the file is there, or its directory is not.
        RunError: the store cannot be read, or the file cannot be written.
    """
    columns = [name for name in COLUMNS if messages or name != "messages"]
    if isinstance(out, Path):
        if out.exists() and not force:
            raise ConfigError(f"--out {out}: is there already; name another file, or add --force to replace it")
        if out.is_dir() or not out.parent.is_dir():
            raise ConfigError(f"--out {out}: is a directory, or lies in none; name a file in one that is there")
    elif to == "parquet":
        raise ConfigError("--out -: Parquet cannot be written to standard output; name a file")
    with closing(open_unwritten(run.store)) as database:
        rows = _rows(database, run.store, columns)
        if not isinstance(out, Path):
            return _write_lines(rows, out)
        return _write_whole(out, lambda partial: _write_to(partial, to, rows, columns))


def query_of(outputs: dict[str, Any]) -> str | None:
    """The search query among a completion's fields: the one called so, or else the last text.

    >>> query_of({"reasoning": "Who wrote it?", "search_query": "author of Emma"})
    'author of Emma'
    """
    texts = {name: value for name, value in outputs.items() if isinstance(value, str)}
    named = [value for name, value in texts.items() if "query" in name.lower()]
    return next(iter(named or reversed(list(texts.values()))), None)


def _rows(database: sqlite3.Connection, path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    try:
        for row in database.execute(_SQL):
            outputs = json.loads(row["outputs"])
            value = {
                "id": row["id"], "question_id": row["question_id"], "step": row["step"], "prompt": row["prompt"],
                "n": row["n"], "messages": json.loads(row["messages"]) if "messages" in columns else None,
                "completion": row["completion"], "query": query_of(outputs), "doc_ids": json.loads(row["doc_ids"]),
                "scores": json.loads(row["scores"]), "reward": row["reward"],
                "recall": json.loads(row["components"]).get("recall"),
                "error": row["failure_kind"], "error_message": row["failure_message"],
                "prompt_tokens": row["n_prompt_tokens"], "completion_tokens": row["n_completion_tokens"],
                "seed": row["seed"], "temperature": row["temperature"], "top_p": row["top_p"],
                "max_tokens": row["max_tokens"], "state_id": row["state_id"], "predictor": row["predictor"],
                "chosen": bool(row["is_chosen"]), "policy": row["policy"], "policy_digest": row["policy_digest"],
                "prompt_digest": row["prompt_digest"],
            }  # fmt: skip
            yield {name: value[name] for name in columns}
    except (sqlite3.Error, ValueError) as error:
        if isinstance(error, sqlite3.Error):
            raise run_error(path, error) from error
        raise RunError(f"{path} holds a row that is no JSON ({error}); `leret store check` tells which") from error


def _write_whole(path: Path, write: Callable[[Path], int]) -> int:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        n = write(partial)
        partial.replace(path)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; nothing is left of it"
        ).failed() from error
    finally:
        partial.unlink(missing_ok=True)
    return n


def _write_to(path: Path, to: Format, rows: Iterator[dict[str, Any]], columns: list[str]) -> int:
    if to == "parquet":
        return _write_parquet(rows, path, columns)
    with path.open("w", encoding="utf-8") as file:
        return _write_lines(rows, file)


def _write_lines(rows: Iterable[dict[str, Any]], file: IO[str]) -> int:
    n = 0
    for n, row in enumerate(rows, 1):  # noqa: B007 - the last one is the number of rows
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    return n


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path, columns: list[str]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    types = {
        "string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(),
        "strings": pa.list_(pa.string()), "floats": pa.list_(pa.float64()), "messages": pa.list_(message),
    }  # fmt: skip
    schema = pa.schema([(name, types[COLUMNS[name]]) for name in columns])
    n = 0
    with pq.ParquetWriter(path, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == _ROWS_A_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                n, batch = n + len(batch), []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return n + len(batch)
