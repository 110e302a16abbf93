import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from leret.core.errors import RunError
from leret.core.types import Failure, State
from leret.sampling.store.store import (
    SCHEMA_SQL,
    STORE_SCHEMA,
    TOKEN_COLUMNS,
    PathStep,
    SamplingParams,
    Store,
    run_error,
    sample_row,
    state_row,
)
from tests.sampling import fakes

ORIGIN = SamplingParams("fake", "P", "D", 1.0, 1.0, 8)
STATE = State("s1", "q1", 0, "write", {"context": ["é", "\ud800"]}, ({"role": "user", "content": "who?"},))


def made(name, **values):
    fields = {
        "state_id": "s1", "task_id": "q1", "seed": 2**63 - 1,
        "completion": "text", "outputs": {"query": "text"}, "doc_ids": ("d1", "d2"), "scores": (2.0, 1.5),
        "reward": 0.5, "components": {"ap": 0.5, "recall": 1.0}, "n_prompt_tokens": 3, "n_completion_tokens": 1,
    } | values  # fmt: skip
    return fakes.made(name, **{"failure": None, **fields})


def failed(name, kind, **values):
    nothing = {"completion": None, "outputs": {}, "doc_ids": (), "scores": (), "reward": None, "components": {}}
    return made(name, failure=Failure(kind, "half a surrogate pair \ud800"), **nothing, **values)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "rollouts.db") as store:
        store.put_state(STATE)
        yield store


def find(store, name):
    return {sample.id: sample for group in store.groups() for sample in group.samples}.get(name)


VISIT = PathStep("q1", 0, "P", "s1", None, "a", "next")


def test_what_is_put_comes_back_as_it_was(store):
    tokens = {"token_ids": (7, 2**31 - 1), "logprobs": (-0.5, 0.0)}
    samples = [made("a", reward=-3.5), made("b", index=1, reward=None, failure=Failure("parse", "é"), **tokens)]
    store.put_samples(samples, ORIGIN)
    store.put_visit(VISIT)
    [group] = store.groups()
    assert (group.state, group.policy_digest, list(group.samples)) == (STATE, "P", samples)
    assert store.visits("P", "q1") == [VISIT]
    assert store.counts() == {"states": 1, "samples": 2, "rewarded": 1, "failed_parse": 1}


def test_a_sample_that_is_there_stays_and_an_outage_is_replaced(store):
    kinds = {"b": "policy", "c": "retrieval", "d": "parse"}
    store.put_samples([made("a"), *(failed(x, kind, index=i) for i, (x, kind) in enumerate(kinds.items(), 1))], ORIGIN)
    tokens = {"token_ids": (7,), "logprobs": (-0.5,)}
    store.put_samples([made(name, index=i, completion="new", **tokens) for i, name in enumerate("abcd")], ORIGIN)
    assert [find(store, name).completion for name in "abcd"] == ["text", "new", "new", None]
    assert [find(store, name).logprobs for name in "abcd"] == [None, (-0.5,), (-0.5,), None]
    assert find(store, "d").failure.message == "half a surrogate pair ?"


def test_a_full_disk_is_one_clear_error_and_the_store_stays(tmp_path, monkeypatch):
    store = Store(tmp_path / "db")
    store.put_state(STATE)
    store.put_samples([made("a")], ORIGIN)
    store.flush()
    store._database.execute("PRAGMA max_page_count = 1")  # what SQLite says then is what it says on a full disk
    store.put_samples([made(f"x{i}", index=i + 1, completion="word " * 500) for i in range(100)], ORIGIN)
    for write in (store.flush, store.close):
        with pytest.raises(RunError, match="the disk is full; free some space and run the same command again"):
            write()
    with Store(tmp_path / "db") as again:
        assert again.counts()["samples"] == 1
        again.put_samples([made("b", index=1)], ORIGIN)
    monkeypatch.setattr("leret.sampling.store.store.disk_usage", lambda path: SimpleNamespace(free=0))
    assert "the disk is full" in str(run_error(tmp_path / "db", sqlite3.OperationalError("disk I/O error")))


def test_merging_twice_is_merging_once(store, tmp_path):
    store.put_samples([failed("a", "policy"), made("b", index=1, completion="mine")], ORIGIN)
    with Store(tmp_path / "other.db") as other:
        other.put_state(STATE)
        other.put_samples([made("a"), made("b", index=1, completion="theirs"), made("c", index=2)], ORIGIN)
        other.put_visit(VISIT._replace(chosen="c", outcome="finished"))
    for _ in range(2):
        store.merge(tmp_path / "other.db")
    assert [find(store, name).completion for name in "abc"] == ["text", "mine", "text"]
    assert store.done("P") == {"q1"}
    store.merge(tmp_path / "other.db", ["q2"])
    assert store.counts()["samples"] == 3


def test_a_contradiction_is_not_merged(store, tmp_path):
    store.put_samples([made("a")], ORIGIN)
    with Store(tmp_path / "other.db") as other:
        other.put_state(replace(STATE, id="s2"))
        other.put_state(STATE)
        other.put_samples([made("z", completion="another answer to what a was asked")], ORIGIN)
    with pytest.raises(RunError, match=r"other\.db rejected a row \(UNIQUE"):
        store.merge(tmp_path / "other.db")
    assert store.counts()["samples"] == len(store._read("SELECT * FROM states")) == 1


WRITER = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from tests.sampling.store.test_store import ORIGIN, STATE, made
from leret.sampling.store.store import Store
store = Store(pathlib.Path(sys.argv[1]))
store.put_state(STATE)
for unit in range(10**9):
    store.put_samples([made(f"{unit}-{i}", index=4 * unit + i) for i in range(4)], ORIGIN)
    if unit % 50 == 0:
        store.flush()
        print(unit, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_units(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "db"), str(Path(__file__).parents[3])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        flushed = [int(process.stdout.readline()) for _ in range(4)][-1]
        time.sleep(0.05)
        process.kill()
    with Store(tmp_path / "db") as store:
        ids = {row["id"] for row in store._read("SELECT id FROM samples")}
    units = {name.split("-")[0] for name in ids}
    assert len(ids) == 4 * len(units)
    assert {str(unit) for unit in range(flushed + 1)} <= units


REFUSED = {
    "FOREIGN KEY": [made("x", index=1, state_id="s2"), made("x", index=1, task_id="q2"), VISIT._replace(state_id="s2"),
                    VISIT._replace(chosen="b"), VISIT._replace(step=1, parent="b")],
    "either a reward or a failure": [made("x", index=1, reward=None), made("x", index=1, reward=float("nan")),
                                     made("x", index=1, failure=Failure("parse", ""))],
    "a reward needs a completion": [made("x", index=1, completion=None)],
    "a reward is a finite number": [made("x", index=1, reward=float("inf"))],
    "one score per document": [made("x", index=1, scores=(1.0,))],
    "one log-probability per token": [made("x", index=1, token_ids=(1, 2), logprobs=(-1.0,))],
    "a finish reason is stop or length": [made("x", index=1, finish_reason="eos")],
    "a failure is of a known kind": [failed("x", "boredom", index=1)],
    "outputs are a JSON object": [made("x", index=1, outputs=["text"])],
    "NOT NULL|cannot store TEXT": [made("x", index=1, prompt=None), made("x", index=1, step="first")],
    "UNIQUE": [made("x", index=0)],
    "the outcome is valid": [VISIT._replace(outcome="bored")],
    "only solved or stuck steps choose none": [VISIT._replace(chosen=None), VISIT._replace(outcome="solved")],
    "only the first step has no parent": [VISIT._replace(parent="a")],
}  # fmt: skip


@pytest.mark.parametrize(("row", "rule"), [(row, rule) for rule, rows in REFUSED.items() for row in rows])
def test_a_row_that_breaks_a_rule_is_refused(store, row, rule):
    store.put_samples([made("a")], ORIGIN)
    store.flush()
    store.put_visit(row) if row.__class__ is PathStep else store.put_samples([row], ORIGIN)
    with pytest.raises(RunError, match=rf"rejected a row .*({rule})"):
        store.flush()
    store._pending["samples"].clear()
    store._pending["visits"].clear()
    assert store.counts()["samples"] == 1


def test_a_store_of_an_earlier_schema_is_read_merged_and_converted(store, tmp_path):
    old = tmp_path / "old.db"
    samples = [made("a", n_completion_tokens=7), made("b", index=1, n_completion_tokens=8)]  # of at most 8 tokens
    with closing(sqlite3.connect(old)) as database, database:
        schema = SCHEMA_SQL.replace(f", {', '.join(TOKEN_COLUMNS)}", "")
        database.executescript(f"PRAGMA journal_mode = WAL;BEGIN;{schema}PRAGMA user_version = 2;COMMIT;")
        rows = [("samples", sample_row(sample, ORIGIN)[:23]) for sample in samples]
        for table, row in (("states", state_row(STATE)), *rows):
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    store.merge(old)
    with Store(old, read_only=True) as reader:
        for place in (reader, store):
            assert find(place, "a") == samples[0]
            assert [find(place, name).is_cut for name in "ab"] == [False, True]
    tokens = {"token_ids": (3,), "logprobs": (-0.25,), "finish_reason": "stop"}
    new = made("c", index=2, n_completion_tokens=8, **tokens)
    with Store(old) as writer:
        writer.put_samples([new], ORIGIN)
        assert (find(writer, "a"), find(writer, "c")) == (samples[0], new)
        assert writer._database.execute("PRAGMA user_version").fetchone()[0] == STORE_SCHEMA
    store.merge(old)
    assert find(store, "c") == new


def test_a_file_that_is_no_store_of_this_version_is_refused(tmp_path):
    with pytest.raises(RunError, match="does not exist; run `leret sample"):
        Store(tmp_path / "db", read_only=True)
    Store(tmp_path / "db").close()
    for version in (1, STORE_SCHEMA + 1):
        with closing(sqlite3.connect(tmp_path / "db")) as database, database:
            database.execute(f"PRAGMA user_version = {version}")
        for read_only in (True, False, False):  # the lock is let go
            with pytest.raises(RunError, match=f"schema {version}, but .* reads schema {STORE_SCHEMA}.*sample again"):
                Store(tmp_path / "db", read_only)
    (tmp_path / "db").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(RunError, match="is damaged"):
        Store(tmp_path / "db")
