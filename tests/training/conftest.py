"""A tiny policy, sampled runs of it, and one thread: torch's results depend on their number."""

from pathlib import Path

import pytest

from leret.core.runs import Run
from tests.tiny import tiny_policy
from tests.training.training_runs import sampled_run


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("base") / "policy")


@pytest.fixture
def run(tmp_path, base) -> Run:
    return sampled_run(tmp_path / "run", base)
