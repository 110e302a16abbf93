"""A stepper over the shipped multi-hop program and the fakes."""

from pathlib import Path

import pytest

from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from tests.sampling.fakes import open_fakes, write_data

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program():
    return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2}, k=2)


@pytest.fixture
def replay(program):
    return Replay(program)


@pytest.fixture
def formatter(program):
    return Formatter(program, CompactAdapter())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory of data, and the policies that were opened."""
    write_data(tmp_path)
    return tmp_path, open_fakes(monkeypatch)
