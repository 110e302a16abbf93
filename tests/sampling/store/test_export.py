import json
import tracemalloc
from dataclasses import replace

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.sampling.store.export import COLUMNS, export_store
from tests.first_steps import read_lines as lines
from tests.sampling.fakes import ROOT, content
from tests.sampling.store.conftest import ORIGIN, STATE, made


def test_parquet_and_json_lines_say_the_same_under_the_names_of_the_docs(sampled, tmp_path):
    n = export_store(sampled, tmp_path / "a.jsonl", messages=True)
    assert n == export_store(sampled, tmp_path / "a.parquet", messages=True)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == list(COLUMNS)
    assert all(f"`{name}`" in (ROOT / "docs/reference/run-directory.md").read_text() for name in COLUMNS)
    assert table.to_pylist() == lines(tmp_path / "a.jsonl")
    rows = lines(tmp_path / "a.jsonl")
    assert [row["id"] for row in rows] == [one.id for group in content(sampled) for one in group.samples]
    assert {(row["predictor"], row["policy"], row["completion_tokens"]) for row in rows} == {("write_query", "fake", 2)}
    assert (n, rows[0]["messages"][-1]["role"]) == (len(rows), "user")


def test_an_existing_file_is_never_replaced(sampled, tmp_path):
    out = tmp_path / "samples.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="already exists; name another file"):
        export_store(sampled, out)
    assert out.read_text() == "mine"
    with pytest.raises(ConfigError, match="already exists"):
        export_store(sampled, tmp_path)
    with pytest.raises(ConfigError, match="not a file in an existing directory"):
        export_store(sampled, tmp_path / "nowhere/samples.jsonl")


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_an_export_that_breaks_off_leaves_no_file(sampled, tmp_path, monkeypatch, name):
    def fails(*args):
        yield {name: None for name in COLUMNS if name != "messages"}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leret.sampling.store.export._rows", fails)
    with pytest.raises(RunError, match="No space left"):
        export_store(sampled, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_standard_output_takes_json_lines(sampled):
    result = CliRunner().invoke(app, ["store", "export", "--run", str(sampled.path), "--out", "-"])
    assert json.loads(result.stdout.splitlines()[0])["question_id"] == "q00"


def test_a_store_is_never_in_memory_whole(store, tmp_path):
    for i in map(str, range(1500)):
        store.put_state(replace(STATE, id=i, messages=({"role": "user", "content": "x" * 1000},)))
        store.put_samples([made(i, state_id=i, completion="x" * 1000)], ORIGIN)
    store.flush()
    tracemalloc.start()
    assert export_store(Run(tmp_path), tmp_path / "samples.jsonl", messages=True) == 1500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "samples.jsonl").stat().st_size / 4
