import os
import shutil
import signal
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from leret.core.errors import MissingDependency, PolicyError, RunError
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.sampling.sharding import RayCluster, Shard, sample_shard
from leret.sampling.stage import sample
from leret.sampling.store.merge import merge_shards, shard_stores
from leret.sampling.store.store import Store
from tests.sampling import fakes
from tests.sampling.fakes import content, events_of, preferences, write_data


def served(server, limit=None, **sampling):
    sampling = {"samples": 1, "max_error_rate": 0.1, **sampling}
    return fakes.served(server, data={"limit": limit}, **sampling)


@pytest.fixture(scope="module")
def connected():
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with RayCluster(2) as cluster:
        yield cluster


def ids(*paths):
    found = set()
    for path in paths:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            found |= {row[0] for row in db.execute("SELECT id FROM samples WHERE failure_kind IS NULL")}
    return found


def test_shards_make_what_one_process_makes(server, run):
    bank = {"train_questions": 4, "dev_questions": 4, "candidates": 2, "max_demos": 1}
    recipe, alone = served(server, 12, prompts=2, samples=2, bank=bank), Run.create(Path("alone"))
    whole = sample(recipe, alone)
    assert [sample_shard(recipe, run, Shard(i, 3)).questions for i in range(3)] == [4, 4, 4]
    assert len(shard_stores(run)) == 3
    assert [event["event"] for event in events_of(run)].count("bank") == 1
    asked = server.n_asked
    report = sample(recipe, run)
    assert (server.n_asked, report.new_questions, report.samples) == (asked, 0, whole.samples)
    assert content(run) == content(alone)
    assert preferences(run) == preferences(alone)
    assert not run.shards.exists()


def test_a_shard_knows_what_the_run_has_and_goes_on_where_it_was_stopped(server, run):
    first = sample(served(server, 4), run)
    for _ in range(2):
        sample_shard(served(server, 12), run, Shard(0, 1))
    assert server.n_asked == len(ids(run.store, *shard_stores(run)))
    assert len(ids(*shard_stores(run))) == server.n_asked - first.samples


def test_shards_sampled_elsewhere_are_merged_by_their_run_directories(server, run):
    there, other = Run.create(Path("there")), Run.create(Path("other"))
    for i, place in enumerate((run, there)):
        sample_shard(served(server, 12), place, Shard(i, 2))
    for _ in range(2):
        assert merge_shards(run, [there.path])["samples"] == server.n_asked
    assert (len(shard_stores(run)), len(shard_stores(there))) == (0, 1)
    sample_shard(served(server, 12, seed=2), other, Shard(0, 1))
    with pytest.raises(RunError, match=r"sampling\.seed: 1 in the run, 2"):
        merge_shards(run, [other.path])
    Prompt("1", {}, {"write_query": "Write."}).save(there.prompts / "1.json")
    with pytest.raises(RunError, match="merge only runs with the same prompts"):
        merge_shards(run, [there.path])


def test_what_a_killed_command_left_is_taken_over_by_the_next_that_runs_alone(server, run):
    done = Run.create(Path("done"))
    sample(served(server, 4), done)
    run.shards.mkdir()
    shutil.copy(done.store, run.shards / "0-of-2.db")
    with closing(sqlite3.connect(run.shards / "1-of-2.db")) as begun:
        begun.execute("PRAGMA journal_mode = WAL")  # killed before it had made a table
    with Store(run.shards / "0-of-2.db"), pytest.raises(RunError, match=r"0-of-2\.db is in use"):
        sample(served(server, 8), run)
    assert sample(served(server, 8), run).samples == server.n_asked
    assert not shard_stores(run)


@pytest.mark.slow  # shards, and what a killed command left, are merged above without Ray
def test_two_workers_one_of_them_killed_make_what_one_process_makes(connected, server, run):
    write_data(Path(), 120)
    recipe, alone = served(server, samples=2), Run.create(Path("alone"))
    n_samples = sample(recipe, alone).samples
    n_alone, open_requests = server.n_asked, []

    def kill():
        until = time.monotonic() + 120
        while time.monotonic() < until and server.answered < n_samples // 3:
            time.sleep(0.01)
        os.kill([event["pid"] for event in events_of(run) if event["event"] == "shard"][-1], signal.SIGKILL)
        open_requests.append(server.n_asked - len(ids(*shard_stores(run))))

    server.asked.clear()
    server.answered, server.delay_s = 0, 0.1
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    report = sample(recipe, run, distribute=RayCluster(2))
    killer.join(5)
    begun = [event["shard"] for event in events_of(run) if event["event"] == "shard"]
    assert len(begun) == len(set(begun)) + 1  # the killed worker's shard, by another one
    assert report.new_samples == n_samples
    assert content(run) == content(alone)
    assert preferences(run) == preferences(alone)
    on_the_way = recipe.policy.concurrency  # requests of the killed worker that the server had not counted yet
    assert server.n_asked <= n_alone + open_requests[0] + on_the_way  # what was committed is not asked for again
    assert not run.shards.exists()


def test_too_many_failures_stop_the_run_and_are_tried_again(connected, server, run):
    write_data(Path(), 120)
    server.broken = lambda body: "number 1" in body["messages"][-1]["content"]
    with pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*refused") as caught:
        sample(served(server), run, distribute=RayCluster(1))
    assert (type(caught.value), caught.value.exit_code) == (PolicyError, 1)
    n_kept, n_asked = len(ids(run.store, *shard_stores(run))), server.n_asked
    server.broken = lambda body: False
    report = sample(served(server), run)
    assert (report.waiting, report.failures) == (0, {})
    assert server.n_asked - n_asked == report.samples - n_kept


def test_ray_and_its_cluster_must_be_there(monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    ray.shutdown()
    with pytest.raises(RunError, match=r"--address auto: cannot join") as caught, RayCluster(1, "auto"):
        pass
    assert caught.value.exit_code == 1
    monkeypatch.setattr("leret.sampling.sharding.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"leret\[ray\]"):
        RayCluster(1)
