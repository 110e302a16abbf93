"""`leret store export`: stream one row per sample to JSON lines or Parquet."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

from leret.core.errors import ConfigError, RunError
from leret.core.files import atomic_file
from leret.core.runs import Run
from leret.sampling.store.store import IN_ORDER, connect, errors_of

COLUMNS = {
    "id": "string", "question_id": "string", "step": "int64", "prompt": "string", "n": "int64",
    "messages": "messages", "completion": "string", "query": "string", "doc_ids": "strings", "scores": "floats",
    "reward": "float64", "recall": "float64", "error": "string", "error_message": "string",
    "prompt_tokens": "int64", "completion_tokens": "int64", "seed": "int64", "temperature": "float64",
    "top_p": "float64", "max_tokens": "int64", "state_id": "string", "predictor": "string", "chosen": "bool",
    "policy": "string", "policy_digest": "string", "prompt_digest": "string",
}  # fmt: skip
"""Columns of an export with their types; ``messages`` is optional, and `message_column` returns its type."""

_NAMES = {
    "error": "failure_kind", "error_message": "failure_message",
    "prompt_tokens": "n_prompt_tokens", "completion_tokens": "n_completion_tokens",
}  # fmt: skip
_ROWS_A_GROUP = 5000
_SQL = (
    "SELECT s.*, t.predictor, t.messages, v.chosen IS s.id AS is_chosen FROM samples s JOIN states t "
    "ON t.id = s.state_id LEFT JOIN visits v ON (v.question_id, v.step, v.policy_digest) = "
    f"(s.question_id, s.step, s.policy_digest) {IN_ORDER}"
)


def export_store(run: Run, out: Path | IO[str], *, messages: bool = False) -> int:
    """Write a run's samples by policy, question, step, prompt and index; return their number.

    ``out`` is a new file, written atomically (Parquet if its name ends in ``.parquet``, otherwise
    JSON lines), or an open text stream for JSON lines. ``messages`` adds the messages of the
    zero-shot prompt.
    """
    columns = {name: kind for name, kind in COLUMNS.items() if messages or name != "messages"}
    with closing(connect(run.store, read_only=True)) as database:
        database.execute("BEGIN")  # one snapshot, even if another process writes
        if messages:
            columns["messages"] = message_column(run.store)
        rows = _rows(database, run.store, columns)
        return export_rows(rows, columns, out)


def export_rows(
    rows: Iterator[dict[str, Any]], columns: Mapping[str, str], out: Path | IO[str]
) -> int:
    """Write rows and return their number.

    ``columns`` maps names to types like `COLUMNS`. See `export_store`.
    """
    if not isinstance(out, Path):
        return _write_lines(rows, out)
    if out.exists():
        raise ConfigError(f"--out {out} already exists; name another file, or delete it")
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out {out} is not a file in an existing directory; choose another path"
        )
    try:
        if out.suffix == ".parquet":
            with atomic_file(out, "wb") as file:
                return write_parquet(rows, file, columns)
        with atomic_file(out, "w") as file:
            return _write_lines(rows, file)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{out} cannot be written ({reason}); choose another path"
        ).failed() from error


def write_parquet(
    rows: Iterator[dict[str, Any]], file: IO[bytes], columns: Mapping[str, str]
) -> int:
    """Write rows as Parquet in batches and return their number.

    ``columns`` maps names to types like `COLUMNS`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = [("role", pa.string()), ("content", pa.string())]
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    calls = pa.list_(
        pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
    )
    tools = [
        ("tool_calls", calls),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
        ("tools", pa.string()),
    ]
    types = {
        "string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(),
        "strings": pa.list_(pa.string()), "floats": pa.list_(pa.float64()), "ints": pa.list_(pa.int32()),
        "messages": pa.list_(pa.struct(text)), "tool messages": pa.list_(pa.struct([*text, *tools])),
    }  # fmt: skip
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    n = 0
    with pq.ParquetWriter(file, schema) as writer:
        batch = list(islice(rows, _ROWS_A_GROUP))
        while batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))
            n += len(batch)
            batch = list(islice(rows, _ROWS_A_GROUP))
    return n


def message_column(store: Path) -> str:
    """Return the Parquet type of a store's prompts: with or without native tool calls."""
    with closing(connect(store, read_only=True)) as database:
        [tools] = database.execute(
            "SELECT EXISTS(SELECT 1 FROM states WHERE instr(messages, '\"tools\":'))"
        ).fetchone()
    return "tool messages" if tools else "messages"


def query_of(outputs: dict[str, Any]) -> str | None:
    """Return a completion's search query: the first text named "query", else the last text."""
    query = None
    for name, value in outputs.items():
        if isinstance(value, str):
            if "query" in name.lower():
                return value
            query = value
    return query


def _rows(
    database: sqlite3.Connection, path: Path, columns: Iterable[str]
) -> Iterator[dict[str, Any]]:
    parsed = {
        "messages": lambda row: json.loads(row["messages"]),
        "query": lambda row: query_of(json.loads(row["outputs"])),
        "doc_ids": lambda row: json.loads(row["doc_ids"]),
        "scores": lambda row: json.loads(row["scores"]),
        "recall": lambda row: json.loads(row["components"]).get("recall"),
        "chosen": lambda row: bool(row["is_chosen"]),
    }
    with errors_of(path):
        for row in database.execute(_SQL):
            values = {}
            for name in columns:
                read = parsed.get(name)
                values[name] = read(row) if read else row[_NAMES.get(name, name)]
            yield values


def _write_lines(rows: Iterable[dict[str, Any]], file: IO[str]) -> int:
    n = 0
    for n, row in enumerate(rows, 1):  # noqa: B007 - the last value is the number of rows
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    return n
