"""Sampling in shards, by hand and on Ray's workers: the same as in one process, whatever becomes of the workers."""

import os
import shutil
import signal
import sqlite3
import threading
import time
from contextlib import closing, suppress

import pytest

from leret.core.errors import ConfigError, MissingDependency, PolicyError, RunError
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.sampling.sharding import RayCluster, Shard, sample_shard
from leret.sampling.stage import sample
from leret.sampling.store.merge import merge_shards, shard_stores
from leret.sampling.store.store import Store
from tests.sampling.fakes import content, write_data
from tests.sampling.seeded_server import served as of_server


def served(server, **sampling):
    return of_server(server, **{"samples": 1, "concurrency": 8, "max_error_rate": 0.1, **sampling})


@pytest.fixture(scope="module")
def connected():
    """Ray on this machine, started once."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with RayCluster(2) as cluster:
        yield cluster


def preferences(run):
    return (run.preferences / "train.parquet").read_bytes()


def ids(paths):
    """Samples that are committed in any of these stores."""
    found = set()
    for path in paths:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            found |= {row[0] for row in db.execute("SELECT id FROM samples WHERE failure_kind IS NULL")}
    return found


def test_shards_make_what_one_process_makes(server, tmp_path):
    write_data(tmp_path, 24)
    demo = {"question": "who", "context": [], "query": "find who"}
    (tmp_path / "own").mkdir()
    Prompt("mine", {"write_query": [demo]}, {}).save(tmp_path / "own" / "mine.json")
    recipe = served(server, prompts=2, samples=2, bank={"path": str(tmp_path / "own")})
    alone, run = Run.create(tmp_path / "alone"), Run.create(tmp_path / "run")
    whole = sample(recipe, alone, base_dir=tmp_path)
    stats = [sample_shard(recipe, run, Shard(i, 3), base_dir=tmp_path) for i in range(3)]
    assert [part.questions for part in stats] == [8, 8, 8]
    assert len(shard_stores(run)) == 3
    assert [event["event"] for event in run.events()].count("bank") == 1
    asked = sum(server.asked.values())
    report = sample(recipe, run, base_dir=tmp_path)
    assert sum(server.asked.values()) == asked
    assert (report.new_questions, report.samples) == (0, whole.samples)
    assert content(run) == content(alone)
    assert preferences(run) == preferences(alone)
    assert not run.shards.exists()


def test_a_shard_knows_what_the_run_has_and_goes_on_where_it_was_stopped(server, tmp_path):
    write_data(tmp_path, 12)
    run = Run.create(tmp_path / "run")
    first = sample(served(server, data={"limit": 4}), run, base_dir=tmp_path)
    for _ in range(2):
        sample_shard(served(server), run, Shard(0, 1), base_dir=tmp_path)
    assert sum(server.asked.values()) == len(ids([run.store, *shard_stores(run)]))
    assert len(ids(shard_stores(run))) == len(ids([run.store, *shard_stores(run)])) - first.samples


def test_shards_sampled_elsewhere_are_merged_by_their_run_directories(server, tmp_path):
    write_data(tmp_path, 12)
    runs = [Run.create(tmp_path / f"machine-{i}") for i in range(2)]
    for i, run in enumerate(runs):
        sample_shard(served(server), run, Shard(i, 2), base_dir=tmp_path)
    for _ in range(2):
        counts = merge_shards(runs[0], [runs[1].path])
    assert counts["samples"] == sum(server.asked.values())
    assert not shard_stores(runs[0])
    assert shard_stores(runs[1])
    other = Run.create(tmp_path / "other")
    sample_shard(served(server, seed=2), other, Shard(0, 1), base_dir=tmp_path)
    with pytest.raises(RunError, match=r"sampling\.seed: 1 in the run, 2"):
        merge_shards(runs[0], [other.path])
    Prompt("1", {}, {"write_query": "Write."}).save(runs[1].prompts / "1.json")
    with pytest.raises(RunError, match="other prompts"):
        merge_shards(runs[0], [runs[1].path])


def test_what_a_killed_command_left_is_taken_over_by_the_next(server, tmp_path):
    write_data(tmp_path, 8)
    done = Run.create(tmp_path / "done")
    sample(served(server, data={"limit": 4}), done, base_dir=tmp_path)
    run = Run.create(tmp_path / "run")
    run.shards.mkdir()
    shutil.copy(done.store, run.shards / "0-of-2.db")
    with closing(sqlite3.connect(run.shards / "1-of-2.db")) as begun:
        begun.execute("PRAGMA journal_mode = WAL")  # killed before it had made a table
    asked = sum(server.asked.values())
    report = sample(served(server), run, base_dir=tmp_path)
    assert sum(server.asked.values()) - asked == report.samples - len(ids([done.store]))
    assert not shard_stores(run)


def test_a_shard_that_is_sampled_into_is_not_merged(server, tmp_path):
    write_data(tmp_path, 4)
    run = Run.create(tmp_path / "run")
    run.shards.mkdir()
    with Store(run.shards / "0-of-2.db"), pytest.raises(RunError, match=r"0-of-2\.db is being sampled into"):
        sample(served(server), run, base_dir=tmp_path)


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "1/2/3", "0/0"])
def test_a_shard_that_is_none_is_a_mistake(text):
    with pytest.raises(ConfigError, match="--shard"):
        Shard.parse(text)


class Killer(threading.Thread):
    """Ends a worker with SIGKILL once the server has answered often enough, and counts what was committed by then."""

    def __init__(self, run, server, after):
        super().__init__(daemon=True)
        self.run_directory, self.server, self.after = run, server, after
        self.killed = None
        self.open_requests = 0

    def run(self):
        until = time.monotonic() + 120
        while time.monotonic() < until and self.server.answered < self.after:
            time.sleep(0.01)
        pid = [event["pid"] for event in self.run_directory.events() if event["event"] == "shard"][-1]
        os.kill(pid, signal.SIGKILL)
        committed = ids(shard_stores(self.run_directory))
        self.open_requests = sum(self.server.asked.values()) - len(committed)
        self.killed = pid


def test_two_workers_one_of_them_killed_make_what_one_process_makes(connected, server, tmp_path):
    write_data(tmp_path, 120)
    recipe = served(server, samples=2)
    alone = Run.create(tmp_path / "alone")
    n_samples = sample(recipe, alone, base_dir=tmp_path).samples
    n_alone = sum(server.asked.values())

    server.asked.clear()
    server.answered, server.delay_s = 0, 0.1
    run = Run.create(tmp_path / "run")
    killer = Killer(run, server, n_samples // 3)
    killer.start()
    report = sample(recipe, run, base_dir=tmp_path, distribute=RayCluster(2))
    killer.join(5)

    assert killer.killed
    begun = [event["shard"] for event in run.events() if event["event"] == "shard"]
    assert len(begun) == len(set(begun)) + 1  # the killed worker's shard, by another one
    assert report.new_samples == n_samples
    assert content(run) == content(alone)
    assert preferences(run) == preferences(alone)
    assert sum(server.asked.values()) <= n_alone + killer.open_requests  # what was committed is not asked for again
    assert not run.shards.exists()


def test_too_many_failures_stop_the_run_and_are_tried_again(connected, server, tmp_path):
    write_data(tmp_path, 60)
    server.broken = lambda body: "number 1" in body["messages"][-1]["content"]
    run = Run.create(tmp_path / "run")
    with pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*refused") as caught:
        sample(served(server), run, base_dir=tmp_path, distribute=RayCluster(1))
    assert caught.value.exit_code == 1
    assert type(caught.value) is PolicyError
    kept = ids([run.store, *shard_stores(run)])
    server.broken = lambda body: False
    asked = sum(server.asked.values())
    report = sample(served(server), run, base_dir=tmp_path)
    assert report.waiting == 0
    assert not report.failures
    assert sum(server.asked.values()) - asked == report.samples - len(kept)


def test_a_cluster_that_is_not_there_is_told():
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    ray.shutdown()
    with pytest.raises(RunError, match=r"--address auto: no Ray cluster") as caught, RayCluster(1, "auto"):
        pass
    assert caught.value.exit_code == 1


def test_ray_must_be_there(monkeypatch):
    monkeypatch.setattr("leret.sampling.sharding.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"leret\[ray\]"):
        RayCluster(1)
