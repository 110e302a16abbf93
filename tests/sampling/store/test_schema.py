"""The tables refuse rows that break a rule; stores of another schema, and files that are none, are refused."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from leret.core.errors import RunError
from leret.core.types import Failure
from leret.sampling.store.schema import STORE_SCHEMA, PathStep, run_error
from leret.sampling.store.store import Store
from tests.sampling.store.test_store import ORIGIN, STATE, failed, made


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "rollouts.db") as store:
        store.put_state(STATE)
        yield store


@pytest.mark.parametrize(
    ("sample", "rule"),
    [
        (made("x", state_id="s2"), "FOREIGN KEY"),
        (made("x", question_id="q2"), "FOREIGN KEY"),
        (made("x", reward=None), "either a reward or a failure"),
        (made("x", failure=Failure("parse", "")), "either a reward or a failure"),
        (made("x", completion=None), "a reward is of a completion"),
        (made("x", reward=float("nan")), "either a reward or a failure"),
        (made("x", reward=float("inf")), "a reward is a finite number"),
        (made("x", scores=(1.0,)), "a score for each document"),
        (failed("x", "boredom"), "a failure is of a known kind"),
        (made("x", outputs=["text"]), "outputs are a JSON object"),
        (made("x", prompt=None), "NOT NULL"),
        (made("x", step="first"), "cannot store TEXT value in INTEGER"),
        (made("other", index=0), "UNIQUE"),
    ],
)
def test_a_sample_that_breaks_a_rule_is_refused(store, sample, rule):
    store.put_samples([made("a")], ORIGIN)
    store.flush()
    store.put_samples([replace(sample, index=1) if sample.id == "x" else sample], ORIGIN)
    with pytest.raises(RunError, match=rf"refuses a row: .*{rule}"):
        store.flush()
    store._pending["samples"] = []
    assert store.counts()["samples"] == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"state_id": "s2"}, "FOREIGN KEY"),
        ({"chosen": "b"}, "FOREIGN KEY"),
        ({"step": 1, "parent": "b"}, "FOREIGN KEY"),
        ({"outcome": "bored"}, "an outcome is known"),
        ({"chosen": None}, "a path goes on by a sample"),
        ({"outcome": "solved"}, "a path goes on by a sample"),
        ({"parent": "a"}, "the first step alone has no parent"),
    ],
)
def test_a_visit_that_breaks_a_rule_is_refused(store, changes, rule):
    store.put_samples([made("a")], ORIGIN)
    store.put_visit(replace(PathStep("q1", 0, "P", "s1", None, "a", "next"), **changes))
    with pytest.raises(RunError, match=rf"refuses a row: .*{rule}"):
        store.flush()
    store._pending["visits"] = []


@pytest.mark.parametrize("version", [1, STORE_SCHEMA + 1])
def test_another_schema_is_refused(tmp_path, version):
    Store(tmp_path / "db").close()
    with closing(sqlite3.connect(tmp_path / "db")) as database, database:
        database.execute(f"PRAGMA user_version = {version}")
    for read_only in (True, False):
        with pytest.raises(RunError, match=f"schema {version}, this leret reads schema {STORE_SCHEMA}.*sample again"):
            Store(tmp_path / "db", read_only)
    Store(tmp_path / "other").close()  # and the lock was let go


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "db").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(RunError, match="is damaged"):
        Store(tmp_path / "db")


def test_reading_what_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(RunError, match="does not exist; run `leret sample"):
        Store(tmp_path / "db", read_only=True)


@pytest.mark.parametrize(("free", "says"), [(0, "the disk is full; free some space"), (10**9, "check the disk")])
def test_an_io_error_on_a_full_disk_says_that_it_is_full(tmp_path, monkeypatch, free, says):
    monkeypatch.setattr("leret.sampling.store.schema.disk_usage", lambda path: SimpleNamespace(free=free))
    assert says in str(run_error(tmp_path / "rollouts.db", sqlite3.OperationalError("disk I/O error")))
