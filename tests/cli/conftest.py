import pytest

from tests.first_steps import write_world
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tiny_policy(tmp_path_factory.mktemp("policy"))
    for file in directory.glob("*config.json"):  # room for DSPy's prompts
        file.write_text(file.read_text(encoding="utf-8").replace(": 512", ": 1024"), encoding="utf-8")
    return directory


@pytest.fixture
def small(policy):
    values = {"policy.model": policy, "data.limit": 6, "sampling.samples": 2, "policy.max_tokens": 6}
    return [part for name, value in {**values, "sampling.prompts": 1}.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    return tmp_path
