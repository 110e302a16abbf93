import pyarrow.parquet as pq
import pytest

from leret.core.runs import Run
from leret.core.types import State
from leret.sampling.store.store import PathStep, SamplingParams, Store
from tests.sampling.fakes import made

ORIGIN = SamplingParams("fake", "P", "D", 1.0, 1.0, 8)
REWARDS = {
    # two hops of q1, the first hop of q2; (prompt, completion, reward)
    ("q1", 0): [("0", "a", 0.5), ("0", "b", 0.0), ("1", "a", 0.5), ("1", "c", 1.0), ("2", "d", None)],
    ("q1", 1): [("0", "x", 0.25), ("1", "y", 0.75)],
    ("q2", 0): [("0", "e", 0.0), ("1", "f", 0.0)],
}


def stored(run, rewards):
    run.update(digests={"policy": ORIGIN.policy_digest})
    with Store(run.store) as store:
        for (question, step), rows in rewards.items():
            state = f"{question}-{step}"
            messages = ({"role": "user", "content": f"ask {state}"},)
            store.put_state(State(state, question, step, "write", {"question": question}, messages))
            store.put_samples([sample_of(i, *row, question, step) for i, row in enumerate(rows)], ORIGIN)
            store.put_visit(PathStep(question, step, "P", state, f"{question}-0-0" if step else None, None, "solved"))
    return run


@pytest.fixture
def run(tmp_path):
    return stored(Run.create(tmp_path / "run"), REWARDS)


def sample_of(i, prompt, text, reward, question, step=0):
    values = {"state_id": f"{question}-{step}", "task_id": question, "step": step, "completion": text}
    return made(f"{question}-{step}-{i}", reward, prompt=prompt, index=i, **values)


def rows_of(run):
    return pq.read_table(run.preferences / "train.parquet").to_pylist()
