import pytest

from leret.core.types import Failure, State
from leret.sampling.store.store import SamplingParams, Store
from tests.sampling import fakes

ORIGIN = SamplingParams("fake", "P", "D", 1.0, 1.0, 8)
STATE = State("s1", "q1", 0, "write", {"context": ["é", "\ud800"]}, ({"role": "user", "content": "who?"},))


def made(name, **values):
    fields = {
        "state_id": "s1", "task_id": "q1", "seed": 2**63 - 1,
        "completion": "text", "outputs": {"query": "text"}, "doc_ids": ("d1", "d2"), "scores": (2.0, 1.5),
        "reward": 0.5, "components": {"ap": 0.5, "recall": 1.0}, "n_prompt_tokens": 3, "n_completion_tokens": 1,
    } | values  # fmt: skip
    return fakes.made(name, **{"failure": None, **fields})


def failed(name, kind, **values):
    nothing = {"completion": None, "outputs": {}, "doc_ids": (), "scores": (), "reward": None, "components": {}}
    return made(name, failure=Failure(kind, "half a surrogate pair \ud800"), **nothing, **values)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "rollouts.db") as store:
        store.put_state(STATE)
        yield store
