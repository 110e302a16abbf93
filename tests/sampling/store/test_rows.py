import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest

from leret.core.errors import RunError
from leret.core.types import Failure
from leret.sampling.store.store import STORE_SCHEMA, PathStep, Store, run_error
from tests.sampling.store.conftest import ORIGIN, failed, made

VISIT = PathStep("q1", 0, "P", "s1", None, "a", "next")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (made("x", index=1, state_id="s2"), "FOREIGN KEY"),
        (made("x", index=1, task_id="q2"), "FOREIGN KEY"),
        (made("x", index=1, reward=None), "either a reward or a failure"),
        (made("x", index=1, failure=Failure("parse", "")), "either a reward or a failure"),
        (made("x", index=1, completion=None), "a reward is of a completion"),
        (made("x", index=1, reward=float("nan")), "either a reward or a failure"),
        (made("x", index=1, reward=float("inf")), "a reward is a finite number"),
        (made("x", index=1, scores=(1.0,)), "a score for each document"),
        (failed("x", "boredom", index=1), "a failure is of a known kind"),
        (made("x", index=1, outputs=["text"]), "outputs are a JSON object"),
        (made("x", index=1, prompt=None), "NOT NULL"),
        (made("x", index=1, step="first"), "cannot store TEXT value in INTEGER"),
        (made("x", index=0), "UNIQUE"),
        (VISIT._replace(state_id="s2"), "FOREIGN KEY"),
        (VISIT._replace(chosen="b"), "FOREIGN KEY"),
        (VISIT._replace(step=1, parent="b"), "FOREIGN KEY"),
        (VISIT._replace(outcome="bored"), "an outcome is known"),
        (VISIT._replace(chosen=None), "a path goes on by a sample"),
        (VISIT._replace(outcome="solved"), "a path goes on by a sample"),
        (VISIT._replace(parent="a"), "the first step alone has no parent"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(store, row, rule):
    store.put_samples([made("a")], ORIGIN)
    store.flush()
    store.put_visit(row) if row.__class__ is PathStep else store.put_samples([row], ORIGIN)
    with pytest.raises(RunError, match=rf"refuses a row: .*{rule}"):
        store.flush()
    store._pending["samples"].clear()
    store._pending["visits"].clear()
    assert store.counts()["samples"] == 1


@pytest.mark.parametrize("version", [1, STORE_SCHEMA + 1])
def test_another_schema_is_refused(tmp_path, version):
    Store(tmp_path / "db").close()
    with closing(sqlite3.connect(tmp_path / "db")) as database, database:
        database.execute(f"PRAGMA user_version = {version}")
    for read_only in (True, False, False):  # the lock is let go
        with pytest.raises(RunError, match=f"schema {version}, this leret reads schema {STORE_SCHEMA}.*sample again"):
            Store(tmp_path / "db", read_only)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(RunError, match="does not exist; run `leret sample"):
        Store(tmp_path / "db", read_only=True)
    (tmp_path / "db").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(RunError, match="is damaged"):
        Store(tmp_path / "db")


def test_an_io_error_on_a_full_disk_says_that_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("leret.sampling.store.store.disk_usage", lambda path: SimpleNamespace(free=0))
    assert "the disk is full" in str(run_error(tmp_path / "rollouts.db", sqlite3.OperationalError("disk I/O error")))
