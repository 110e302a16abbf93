"""The shipped multi-hop program, data with fakes in the current directory, a server."""

import pytest

from leret.core.runs import Run
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from tests.sampling.fakes import ROOT, open_fakes, write_data
from tests.sampling.seeded_server import SeededServer


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
def made(tmp_path, monkeypatch):
    """The policies that were opened, over data in the current directory."""
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return open_fakes(monkeypatch)


@pytest.fixture
def run(tmp_path, made):
    return Run.create(tmp_path / "run")


@pytest.fixture
def server():
    started = SeededServer()
    yield started
    started.close()
