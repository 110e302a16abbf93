"""Sampling on Ray's workers: the same as in one process, whatever becomes of the workers."""

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
from leret.sampling.ray import wire as scaleout_wire
from leret.sampling.ray.scaleout import Cluster
from leret.sampling.stage import sample
from leret.sampling.store.merge import leftovers
from leret.sampling.store.store import Store
from tests.sampling.seeded_server import SeededServer
from tests.sampling.test_stage import content, recipe_of, write_data

ray = pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.fixture(scope="module")
def connected():
    """Ray on this machine, started once."""
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def server():
    made = SeededServer()
    yield made
    made.close()


def served(server, **sampling):
    data = sampling.pop("data", {})
    policy = {"kind": "openai", "model": "seeded", "urls": [server.url]}
    return recipe_of(policy=policy, data=data, **{"prompts": 1, "samples": 1, "concurrency": 8, **sampling})


def preferences(run):
    return (run.preferences / "train.parquet").read_bytes()


def accounts(run):
    return [event for event in run.events() if event["event"] == "accounts"][-1]


def ids(paths):
    """Samples that are committed in any of these stores; one that is gone by now was merged into a later one."""
    found = set()
    for path in paths:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            found |= {row[0] for row in db.execute("SELECT id FROM samples WHERE failure_kind IS NULL")}
    return found


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
        events = [event for event in self.run_directory.events() if event["event"] == "worker"]
        pid = events[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        committed = ids([*leftovers(self.run_directory.workers), self.run_directory.store])
        self.open_requests = sum(self.server.asked.values()) - len(committed)
        self.killed = pid


def test_two_workers_one_of_them_killed_make_what_one_process_makes(connected, server, tmp_path):
    write_data(tmp_path, 120)
    recipe = served(server, samples=2)
    alone = Run.create(tmp_path / "alone")
    sample(recipe, alone, base_dir=tmp_path)
    n_samples = sum(len(group.samples) for group in content(alone))
    n_alone = sum(server.asked.values())

    server.asked.clear()
    server.answered, server.delay_s = 0, 0.1
    run = Run.create(tmp_path / "run")
    killer = Killer(run, server, n_samples // 3)
    killer.start()
    report = sample(recipe, run, base_dir=tmp_path, cluster=Cluster(2))
    killer.join(5)

    assert killer.killed
    lost = [event for event in run.events() if event["event"] == "worker lost"]
    assert [event["pid"] for event in lost] == [killer.killed]
    assert lost[0]["shards"] > 0
    assert [event["hop"] for event in accounts(run)["by_hop_and_prompt"]] == [1, 2]
    assert report.new_samples == n_samples
    assert content(run) == content(alone)
    assert preferences(run) == preferences(alone)
    assert sum(server.asked.values()) <= n_alone + killer.open_requests  # what was committed is not asked for again
    assert not run.workers.exists()


def test_a_second_command_goes_on_and_asks_nothing_again(connected, server, tmp_path):
    write_data(tmp_path, 24)
    run = Run.create(tmp_path / "run")
    sample(served(server, data={"limit": 10}), run, base_dir=tmp_path, cluster=Cluster(2))
    second = sample(served(server), run, base_dir=tmp_path, cluster=Cluster(2))
    assert second.new_questions == 14
    assert sum(server.asked.values()) == second.samples
    alone = Run.create(tmp_path / "alone")
    sample(served(server), alone, base_dir=tmp_path)
    assert preferences(run) == preferences(alone)


def test_workers_that_see_no_common_directory_send_everything(connected, server, tmp_path, monkeypatch):
    write_data(tmp_path, 12)
    monkeypatch.setattr(scaleout_wire, "TOKEN", "another")  # the workers look for the usual one
    run = Run.create(tmp_path / "run")
    report = sample(served(server), run, base_dir=tmp_path, cluster=Cluster(1))
    assert [event["shared"] for event in run.events() if event["event"] == "worker"] == [False]
    assert report.new_questions == 12
    assert sum(server.asked.values()) == report.samples


def test_too_many_failures_stop_the_run_and_are_tried_again(connected, server, tmp_path):
    write_data(tmp_path, 60)
    server.broken = lambda body: "number 1" in body["messages"][-1]["content"]
    run = Run.create(tmp_path / "run")
    with pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*refused") as caught:
        sample(served(server), run, base_dir=tmp_path, cluster=Cluster(1))
    assert caught.value.exit_code == 1
    assert type(caught.value) is PolicyError
    kept = ids([run.store])
    server.broken = lambda body: False
    asked = sum(server.asked.values())
    report = sample(served(server), run, base_dir=tmp_path, cluster=Cluster(1))
    assert report.waiting == 0
    assert not report.failures
    assert sum(server.asked.values()) - asked == report.samples - len(kept)


def test_completions_that_do_not_parse_stop_the_run_early(connected, server, tmp_path):
    write_data(tmp_path, 200)
    blank = {"index": 0, "message": {"content": " "}, "finish_reason": "stop"}
    server.lie, server.delay_s = lambda body: {"choices": [blank]}, 0.05
    with pytest.raises(PolicyError, match=r"completions do not parse; one of them: ' ' is"):
        sample(served(server, samples=4), Run.create(tmp_path / "run"), base_dir=tmp_path, cluster=Cluster(1))
    assert server.answered < 600


def test_what_a_killed_driver_left_is_taken_over_by_the_next_command(server, tmp_path):
    write_data(tmp_path, 8)
    done = Run.create(tmp_path / "done")
    sample(served(server, data={"limit": 4}), done, base_dir=tmp_path)
    run = Run.create(tmp_path / "run")
    run.workers.mkdir()
    shutil.copy(done.store, run.workers / "host-1.db")
    (run.workers / "host-1.db.lock").touch()
    with closing(sqlite3.connect(run.workers / "host-2.db")) as begun:
        begun.execute("PRAGMA journal_mode = WAL")  # killed before it had made a table
    asked = sum(server.asked.values())
    report = sample(served(server), run, base_dir=tmp_path)
    assert sum(server.asked.values()) - asked == report.samples - len(ids([done.store]))
    assert not leftovers(run.workers)


def test_a_store_that_a_worker_still_holds_is_waited_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr("leret.sampling.store.merge._RELEASED_S", 0.3)
    write_data(tmp_path, 4)
    run = Run.create(tmp_path / "run")
    run.workers.mkdir()
    with Store(run.workers / "host-1.db"), pytest.raises(RunError, match="still being written by a worker"):
        sample(served(server), run, base_dir=tmp_path)


def test_a_cluster_that_is_not_there_is_told(monkeypatch):
    ray.shutdown()
    with pytest.raises(RunError, match=r"--address auto: no Ray cluster") as caught, Cluster(1, "auto"):
        pass
    assert caught.value.exit_code == 1


def test_workers_must_be_some_and_ray_must_be_there(monkeypatch):
    with pytest.raises(ConfigError, match="--workers 0"):
        Cluster(0)
    monkeypatch.setattr("leret.sampling.ray.scaleout.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"leret\[ray\]"):
        Cluster(1)
