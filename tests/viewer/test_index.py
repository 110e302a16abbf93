from dataclasses import replace

from leret.core.types import Failure
from leret.sampling.store.store import Store
from leret.viewer import index as module
from leret.viewer.index import RunIndex
from tests.viewer.conftest import ORIGIN, sample, state


def questions(index):
    rows = index.read("SELECT question_id, steps, n, best, spread, failures FROM questions ORDER BY question_id")
    return [tuple(row) for row in rows]


def times(run):
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def test_questions_have_figures_of_their_sampled_groups(shared, tmp_path, monkeypatch):
    before = times(shared[0])
    index = RunIndex(shared[0], tmp_path / "i.db")
    assert questions(index) == [("q1", 2, 7, 1.0, 1.0, 1), ("q2", 1, 2, 0.0, 0.0, 0)]
    assert index.complete
    assert [row["name"] for row in index.read("SELECT name FROM policies ORDER BY place")] == ["base", "sft"]
    assert not index.advance()
    monkeypatch.setattr(module, "_ROWS", 1)
    by_row = RunIndex(shared[0], tmp_path / "j.db")
    assert not by_row.complete
    while by_row.advance():
        pass
    assert questions(by_row) == questions(index)
    assert times(shared[0]) == before


def test_a_growing_store_is_followed_and_retried_samples_and_new_rewards_are_read_again(run, tmp_path):
    index = RunIndex(run, tmp_path / "i.db")
    scored = replace(sample("v", "v0", reward=1.0), task_id="q9")
    failed = replace(scored, failure=Failure("policy", "away"), completion=None, outputs={}, reward=None, components={})
    with Store(run.store) as store:  # from here on, the store has a write-ahead log
        store.put_state(state("v0", "q9"))
        for one, n_failures in ((failed, 1), (scored, 0)):
            store.put_samples([one], ORIGIN)
            store.flush()
            while index.advance():
                pass
            assert ("q9", n_failures) in [(row[0], row[5]) for row in questions(index)]
        store.put_rewards([sample("g", "t0", ("d3",), 0.75)], run.prepare({}))
    while index.advance():
        pass
    assert ("q2", 1, 2, 0.75, 0.75, 0) in questions(index)
