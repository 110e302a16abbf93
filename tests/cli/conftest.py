import pytest

from tests.first_steps import write_world
from tests.tiny import tiny_policy


def settings(values):
    """Return flags that set the keys of a recipe."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


SMALL_WORLD = "{n_train: 20, n_dev: 5, n_test: 5}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tiny_policy(tmp_path_factory.mktemp("policy"))
    for file in directory.glob("*config.json"):  # room for DSPy's prompts
        file.write_text(file.read_text(encoding="utf-8").replace(": 512", ": 1024"), encoding="utf-8")
    return directory


@pytest.fixture
def small(policy):
    values = {"policy.model": policy, "data.limit": 6, "data.options": SMALL_WORLD, "policy.max_tokens": 6}
    values |= {"sampling.samples": 2, "sampling.prompts": 1}
    return settings(values)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path, 14, 2, 4)
    return tmp_path
