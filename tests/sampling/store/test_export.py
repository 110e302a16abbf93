"""`leret store export`: every sample a row, whole or not at all."""

import io
import json
import tracemalloc
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.core.types import Sample, State, digest
from leret.sampling.stage import sample
from leret.sampling.store.export import COLUMNS, export_store, query_of
from leret.sampling.store.schema import SamplingParams
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, content, policy_is, recipe_of, write_data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("export")
    write_data(directory)
    run = Run.create(directory / "run")
    with policy_is(FakePolicy(junk=0.1)):
        sample(recipe_of(), run, base_dir=directory)
    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sample_is_a_row_in_the_order_of_the_store(run, tmp_path):
    out = tmp_path / "samples.jsonl"
    n = export_store(run, "jsonl", out)
    rows = lines(out)
    stored = [(group, one) for group in content(run) for one in group.samples]
    assert n == len(rows) == len(stored)
    for row, (group, one) in zip(rows, stored, strict=True):
        assert (row["id"], row["question_id"], row["step"]) == (one.id, one.question_id, one.step)
        assert (row["prompt"], row["n"], row["seed"]) == (one.prompt, one.index, one.seed)
        assert row["completion"] == one.completion
        assert row["query"] == one.outputs.get("query")
        assert row["doc_ids"] == list(one.doc_ids)
        assert row["reward"] == one.reward
        assert row["error"] == (one.failure and one.failure.kind)
        assert row["predictor"] == group.state.predictor
        assert row["completion_tokens"] == 2
        assert row["policy_digest"] == "fake-policy"
    assert any(row["error"] == "parse" for row in rows)
    # Every sample that goes on at the first step leads to one state of the second.
    went_on = [row["question_id"] for row in rows if row["chosen"] and row["step"] == 0]
    assert sorted(went_on) == sorted({row["question_id"] for row in rows if row["step"] == 1})


def test_parquet_and_json_lines_say_the_same(run, tmp_path):
    export_store(run, "jsonl", tmp_path / "a.jsonl", messages=True)
    export_store(run, "parquet", tmp_path / "a.parquet", messages=True)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == list(COLUMNS)
    assert table.to_pylist() == lines(tmp_path / "a.jsonl")
    assert lines(tmp_path / "a.jsonl")[0]["messages"][-1]["role"] == "user"


def test_a_file_that_is_there_is_replaced_only_when_told(run, tmp_path):
    out = tmp_path / "samples.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match=r"is there already.*--force"):
        export_store(run, "jsonl", out)
    assert out.read_text() == "mine"
    assert export_store(run, "jsonl", out, force=True) == len(lines(out))
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_an_export_that_breaks_off_leaves_what_was_there(run, tmp_path, monkeypatch, to):
    out = tmp_path / "samples"
    out.write_text("mine")

    def fails(*args):
        yield {name: None for name in COLUMNS if name != "messages"}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leret.sampling.store.export._rows", fails)
    with pytest.raises(RunError, match="No space left"):
        export_store(run, to, out, force=True)
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]


def test_standard_output_takes_lines_and_no_parquet(run, tmp_path):
    stream = io.StringIO()
    n = export_store(run, "jsonl", stream)
    assert len(stream.getvalue().splitlines()) == n
    with pytest.raises(ConfigError, match="Parquet cannot be written to standard output"):
        export_store(run, "parquet", stream)
    result = CliRunner().invoke(app, ["store", "export", "--run", str(run.path), "--out", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[0])["question_id"] == "q00"


@pytest.mark.parametrize("out", ["nowhere/samples.jsonl", "."])
def test_a_place_that_takes_no_file_is_a_mistake(run, tmp_path, out):
    place = tmp_path if out == "." else tmp_path / out
    result = CliRunner().invoke(app, ["store", "export", "--run", str(run.path), "--out", str(place), "--force"])
    assert result.exit_code == 2
    assert "is a directory, or lies in none" in result.output


def test_memory_does_not_grow_with_the_store(tmp_path):
    def peak(n):
        run = Run.create(tmp_path / str(n))
        origin = SamplingParams("p", "p", "0", 1.0, 1.0, 8)
        with Store(run.store) as store:
            for i in range(n):
                state = State(digest(i), f"q{i}", 0, "write", {}, ({"role": "user", "content": "x" * 1000},))
                store.put_state(state)
                store.put_samples(
                    [Sample(digest("s", i), state.id, f"q{i}", 0, "0", 0, i, "x" * 1000, reward=0.5)], origin
                )
        tracemalloc.start()
        assert export_store(run, "jsonl", tmp_path / f"{n}.jsonl", messages=True) == n
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many = peak(500), peak(4000)
    assert many < 1.5 * few + 100_000


def test_the_query_is_the_field_called_so_or_else_the_last_text():
    assert query_of({"query": "a", "reasoning": "b"}) == "a"
    assert query_of({"reasoning": "b", "answer": "c", "list": ["d"]}) == "c"
    assert query_of({}) is None


def test_the_columns_of_the_docs_are_those_of_the_file():
    text = (Path(__file__).parents[3] / "docs/run-directory.md").read_text()
    assert all(f"`{name}`" in text for name in COLUMNS)
