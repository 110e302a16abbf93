import shutil

import pytest

from leret.core.runs import Run
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.sampling.stage import sample
from tests.sampling.fakes import ROOT, FakePolicy, SeededServer, open_fakes, policy_is, recipe_of, write_data


@pytest.fixture
def program():
    return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2)


@pytest.fixture
def replay(program):
    return Replay(program, CompactAdapter())


@pytest.fixture
def formatter(replay):
    return Formatter(replay)


@pytest.fixture
def in_data(tmp_path, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(in_data, monkeypatch):
    return open_fakes(monkeypatch)


@pytest.fixture
def run(tmp_path, made):
    return Run.create(tmp_path / "run")


def sampled_by(policy, directory, limit, **recipe):
    run = Run.create(directory)
    with policy_is(policy):
        sample(recipe_of(data={"limit": limit}, **{"prompts": 1, "samples": 6, **recipe}), run)
    return run


@pytest.fixture(scope="session")
def sampled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sampled")
    write_data(directory)
    run = Run.create(directory / "run")
    with policy_is(FakePolicy(junk=0.1)):
        sample(recipe_of(), run, base_dir=directory)
    return run


@pytest.fixture
def sampled_copy(sampled, tmp_path):
    shutil.copytree(sampled.path.parent, tmp_path / "copy")
    return Run(tmp_path / "copy" / "run")


@pytest.fixture
def server():
    started = SeededServer()
    yield started
    started.close()
