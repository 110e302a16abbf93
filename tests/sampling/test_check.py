"""`leret store check` finds every kind of damage, and writes nothing."""

import os
import shutil
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from leret.cli import app
from leret.core.errors import RunError
from leret.core.runs import Run
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy
from tests.sampling.test_stage import recipe_of, write_data


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A sampled run in which some completions do not parse."""
    directory = tmp_path_factory.mktemp("check")
    write_data(directory)
    run = Run.create(directory / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leret.policies.load.policy_of", lambda settings: FakePolicy(junk=0.1))
        sample(recipe_of(), run, base_dir=directory)
    return run


@pytest.fixture
def run(original, tmp_path):
    """A copy of it and of its data, to be damaged."""
    shutil.copytree(original.path.parent, tmp_path / "copy")
    return Run(tmp_path / "copy" / "run")


def change(run, sql, *values):
    with closing(sqlite3.connect(run.store)) as database, database:
        assert database.execute(sql, values).rowcount > 0
    with closing(sqlite3.connect(run.store)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def kinds(run):
    return [fault.what for fault in check_store(run).faults]


def test_a_store_that_was_sampled_is_sound(original):
    report = check_store(original)
    assert report.faults == []
    assert report.notes == []
    assert report.failed["parse"] > 0
    assert report.samples == report.scored + report.failed["parse"]
    assert report.rewards_recomputed == report.scored


def test_nothing_is_written(run):
    def state():
        return {
            file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.path.iterdir() if file.is_file()
        }

    before = state()
    check_store(run)
    assert state() == before


def test_a_store_in_use_can_be_checked(run):
    with Store(run.store):
        assert check_store(run).faults == []


ONE = "WHERE rowid = (SELECT min(rowid) FROM samples WHERE reward IS NOT NULL)"
BAD = "WHERE rowid = (SELECT min(rowid) FROM samples WHERE failure_kind = 'parse')"


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE states SET inputs = '{\"question\":\"x\"}' WHERE id = (SELECT min(id) FROM states)", "state's id"),
        ("UPDATE states SET messages = '[]' WHERE id = (SELECT min(id) FROM states)", "state's messages"),
        ("DELETE FROM states WHERE id = (SELECT min(id) FROM states)", "sample's state is missing"),
        (f"UPDATE samples SET question_id = 'other' {ONE}", "another question than its state"),
        (f"UPDATE samples SET max_tokens = 9 {ONE}", "sample's id is not the digest"),
        (f"UPDATE samples SET seed = 9 {ONE}", "seed does not follow"),
        (f"UPDATE samples SET policy_digest = 'x' {ONE}", "policy that run.yaml does not list"),
        (f"UPDATE samples SET prompt_digest = 'x' {ONE}", "another prompt than the one of that name"),
        (f"UPDATE samples SET reward = NULL {ONE}", "both a reward and a failure, or neither"),
        (f"UPDATE samples SET failure_kind = 'parse' {ONE}", "both a reward and a failure, or neither"),
        (f"UPDATE samples SET failure_kind = 'boredom' {BAD}", "unknown reason (boredom)"),
        (f"UPDATE samples SET doc_ids = '[\"alpha\"]' {BAD}", "failed sample has a ranking"),
        (f"UPDATE samples SET completion = NULL {ONE}", "no completion"),
        (f"UPDATE samples SET outputs = '{{' {ONE}", "no JSON"),
        (f"UPDATE samples SET scores = '[1.0, 2.0]', doc_ids = '[\"a\", \"b\"]' {ONE}", "ranking is none"),
        (f"UPDATE samples SET reward = 2 {ONE}", "outside of 0 to 1"),
        (f"UPDATE samples SET reward = reward / 3 + 0.1 {ONE}", "not the component"),
        (f"UPDATE samples SET doc_ids = '[\"none\"]', scores = '[1.0]', reward = 1 {ONE}", "not the ap of its ranking"),
        ("UPDATE visits SET state_id = 'x' WHERE step = 1", "visit's state is missing"),
        ("UPDATE visits SET outcome = 'bored' WHERE step = 0", "no outcome that there is"),
        ("UPDATE visits SET chosen = NULL WHERE outcome = 'next'", "goes on without a chosen sample"),
        ("UPDATE visits SET chosen = 'x' WHERE outcome = 'next'", "chosen sample is missing"),
        (f"UPDATE visits SET chosen = (SELECT id FROM samples {ONE}) WHERE outcome = 'next'", "of another state"),
        ("UPDATE visits SET parent = 'x' WHERE step = 0", "first visit has a parent"),
        ("DELETE FROM visits WHERE outcome = 'next'", "does not follow from the one before"),
    ],
)  # fmt: skip
def test_every_kind_of_damage_is_found(run, sql, says):
    change(run, sql)
    found = kinds(run)
    assert any(says in what for what in found), found


def test_a_fault_of_many_rows_is_one_message(run):
    change(run, "UPDATE samples SET seed = seed + 1")
    result = CliRunner().invoke(app, ["store", "check", "--run", str(run.path)])
    assert result.exit_code == 1
    n = check_store(run).samples
    assert f"seed does not follow from the run's seed ({n} rows): " in result.output
    assert "2 kinds of faults" in result.output  # the ids do not follow either


def test_a_file_that_is_damaged_is_told(run):
    data = bytearray(run.store.read_bytes())
    data[4096 * 3 : 4096 * 5] = os.urandom(8192)
    run.store.write_bytes(data)
    result = CliRunner().invoke(app, ["store", "check", "--run", str(run.path)])
    assert result.exit_code in {1, 2}
    assert "damaged" in result.output


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("PRAGMA user_version = 7", "is a store of schema 7, this leret reads schema"),
        ("ALTER TABLE visits DROP COLUMN outcome", "table visits has not its columns"),
    ],
)
def test_a_store_of_another_schema_is_told(run, sql, says):
    with closing(sqlite3.connect(run.store, isolation_level=None)) as database:
        database.execute(sql)
    result = CliRunner().invoke(app, ["store", "check", "--run", str(run.path)])
    assert result.exit_code in {1, 2}
    assert says in result.output


def test_a_missing_store_is_a_mistake(tmp_path):
    run = Run.create(tmp_path / "run")
    with pytest.raises(RunError, match="does not exist; run `leret sample"):
        check_store(run)


def test_what_cannot_be_checked_is_said(run):
    manifest = run.manifest()
    manifest["sampling"]["data"]["questions"] = "/nowhere/questions.jsonl"
    run.update(sampling=manifest["sampling"])
    (run.prompts / "1.json").unlink()
    (run.workers).mkdir()
    (run.workers / "host-1.db").touch()
    report = check_store(run)
    assert report.faults == []
    assert [note.split(":")[0] for note in report.notes[:2]] == [
        "prompts are not checked",
        "rewards are not computed again",
    ]
    assert "1 stores of workers are not merged" in report.notes[2]
    assert not report.rewards_recomputed
