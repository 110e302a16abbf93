import os

import pytest

from leret.sampling.store.check import check_store
from leret.sampling.store.store import Store
from tests.first_steps import leret
from tests.sampling.fakes import change


@pytest.fixture
def run(sampled_copy):
    return sampled_copy


def test_a_store_that_was_sampled_is_sound_and_stays_as_it_is(run):
    def files():
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir() if path.is_file()}

    before, report = files(), check_store(run)
    assert files() == before
    assert (report.faults, report.notes) == ([], [])
    assert report.failed["parse"] > 0
    assert report.samples - report.failed["parse"] == report.scored == report.rewards_recomputed
    with Store(run.store):  # in use
        assert check_store(run).faults == []


ONE = "WHERE rowid = (SELECT min(rowid) FROM samples WHERE reward IS NOT NULL)"


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("DELETE FROM states WHERE id = (SELECT min(id) FROM states)", "missing state or sample"),
        (f"UPDATE samples SET question_id = 'other' {ONE}", "missing state or sample"),
        ("UPDATE visits SET chosen = 'x' WHERE outcome = 'next'", "missing state or sample"),
        (f"UPDATE visits SET chosen = (SELECT id FROM samples {ONE}) WHERE outcome = 'next'", "has another state"),
        ("DELETE FROM visits WHERE outcome = 'next'", "parent is not the sample chosen at the previous step"),
        (f"UPDATE samples SET reward = reward / 3 + 0.1 {ONE}", "reward does not match"),
        (f"UPDATE samples SET doc_ids = '[\"none\"]', scores = '[1.0]', reward = 1 {ONE}", "reward does not match"),
    ],
)
def test_every_kind_of_damage_is_found(run, sql, says):
    change(run, sql)
    faults = check_store(run).faults
    assert any(says in fault for fault in faults), faults


def test_a_fault_of_many_rows_is_one_message_and_a_damaged_file_is_told(run):
    change(run, "UPDATE samples SET reward = reward - 1 WHERE reward IS NOT NULL")
    code, out = leret("store", "check", "--run", run.path)
    assert (code, f"does not match its ranking ({check_store(run).scored} rows): " in out) == (1, True), out
    data = bytearray(run.store.read_bytes())
    data[4096 * 3 : 4096 * 5] = os.urandom(8192)
    run.store.write_bytes(data)
    code, out = leret("store", "check", "--run", run.path)
    assert (code in {1, 2}, "damaged" in out) == (True, True), out


def test_code_that_a_run_names_is_not_run(run):
    evil, mark = run.path / "evil.py", run.path / "evil.ran"
    evil.write_text(f"open({str(mark)!r}, 'w').close()\ndef score(outcome):\n    return 0.0\n")
    section = run.manifest.sampling
    for reward in (f"{evil}:score", {"parts": {"mine": {"function": f"{evil}:score"}}}):
        run.update(sampling={**section, "sampling": {**section["sampling"], "reward": reward}})
        report = check_store(run)
        assert (mark.exists(), report.faults, report.rewards_recomputed) == (False, [], 0)
        assert "rewards were not checked" in report.notes[0]
