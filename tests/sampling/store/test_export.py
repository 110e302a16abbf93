import json

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.errors import ConfigError, RunError
from leret.sampling.store.export import COLUMNS, export_store
from tests.first_steps import read_lines as lines
from tests.sampling.fakes import ROOT, content


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
    first = (
        CliRunner().invoke(app, ["store", "export", "--run", str(sampled.path), "--out", "-"]).stdout.splitlines()[0]
    )
    assert json.loads(first)["question_id"] == "q00"


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
