"""`leret store check` finds every kind of damage, and writes nothing."""

import os
import shutil
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.core.runs import Run
from leret.sampling.stage import sample
from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, policy_is, recipe_of, write_data


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A sampled run in which some completions do not parse."""
    directory = tmp_path_factory.mktemp("check")
    write_data(directory)
    run = Run.create(directory / "run")
    with policy_is(FakePolicy(junk=0.1)):
        sample(recipe_of(), run, base_dir=directory)
    return run


@pytest.fixture
def run(original, tmp_path):
    """A copy of it and of its data, to be damaged."""
    shutil.copytree(original.path.parent, tmp_path / "copy")
    return Run(tmp_path / "copy" / "run")


def change(run, sql):
    with closing(sqlite3.connect(run.store)) as database, database:
        assert database.execute(sql).rowcount > 0
    with closing(sqlite3.connect(run.store)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


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


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("DELETE FROM states WHERE id = (SELECT min(id) FROM states)", "state or sample that is missing"),
        (f"UPDATE samples SET question_id = 'other' {ONE}", "state or sample that is missing"),
        ("UPDATE visits SET chosen = 'x' WHERE outcome = 'next'", "state or sample that is missing"),
        (f"UPDATE visits SET chosen = (SELECT id FROM samples {ONE}) WHERE outcome = 'next'", "of another state"),
        ("DELETE FROM visits WHERE outcome = 'next'", "does not follow from the one before"),
        (f"UPDATE samples SET reward = reward / 3 + 0.1 {ONE}", "reward does not follow"),
        (f"UPDATE samples SET doc_ids = '[\"none\"]', scores = '[1.0]', reward = 1 {ONE}", "reward does not follow"),
    ],
)
def test_every_kind_of_damage_is_found(run, sql, says):
    change(run, sql)
    faults = check_store(run).faults
    assert any(says in fault for fault in faults), faults


def test_a_fault_of_many_rows_is_one_message(run):
    change(run, "UPDATE samples SET reward = reward - 1 WHERE reward IS NOT NULL")
    result = CliRunner().invoke(app, ["store", "check", "--run", str(run.path)])
    assert result.exit_code == 1
    report = check_store(run)
    assert f"a reward does not follow from its ranking ({report.scored} rows): " in result.output


def test_a_file_that_is_damaged_is_told(run):
    data = bytearray(run.store.read_bytes())
    data[4096 * 3 : 4096 * 5] = os.urandom(8192)
    run.store.write_bytes(data)
    result = CliRunner().invoke(app, ["store", "check", "--run", str(run.path)])
    assert result.exit_code in {1, 2}
    assert "damaged" in result.output


def test_what_cannot_be_checked_is_said(run):
    manifest = run.manifest()
    manifest["sampling"]["data"]["questions"] = "/nowhere/questions.jsonl"
    run.update(sampling=manifest["sampling"])
    run.shards.mkdir()
    (run.shards / "0-of-2.db").touch()
    report = check_store(run)
    assert report.faults == []
    assert report.rewards_recomputed == 0
    assert "rewards are not computed again" in report.notes[0]
    assert "1 stores of shards are not merged" in report.notes[1]
