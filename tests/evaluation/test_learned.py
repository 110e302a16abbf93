"""What a run learned from is read from its store and its preferences."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.core.types import Failure, Sample, State
from leret.evaluation.report.training_stats import Learned, learned
from leret.sampling.store.schema import SamplingParams
from leret.sampling.store.store import Store

ORIGIN = SamplingParams("p", "digest", "prompt", 1.0, 1.0, 8)


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run")


def test_rewards_by_hop_spread_and_failures(run):
    with Store(run.store) as store:
        for state, step, rewards in (("s1", 0, [0.5, 1.0]), ("s2", 1, [0.5, 0.5])):
            store.put_state(State(state, "q", step, "write", {}, ()))
            samples = [
                Sample(f"{state}-{i}", state, "q", step, "0", i, i, "text", reward=reward)
                for i, reward in enumerate(rewards)
            ]
            store.put_samples(samples, ORIGIN)
        store.put_samples([Sample("bad", "s2", "q", 1, "0", 2, 2, "", failure=Failure("parse", "x"))], ORIGIN)
    found = learned(run)
    assert found.rewards == {1: [0.5, 1.0], 2: [0.5, 0.5]}
    assert (found.n_states, found.n_spread, found.failures) == (2, 1, {"parse": 1})


def test_margins_by_hop(run):
    run.preferences.mkdir()
    table = pa.table({"step": [0, 1], "score_chosen": [1.0, 0.5], "score_rejected": [0.5, 0.25], "prompt": ["a", "b"]})
    pq.write_table(table, run.preferences / "train.parquet")
    assert learned(run).margins == {1: [0.5], 2: [0.25]}


def test_a_run_without_samples_has_learned_from_nothing(run):
    assert learned(run) == Learned()


def test_damaged_preferences_say_what_to_do(run):
    run.preferences.mkdir()
    (run.preferences / "train.parquet").write_bytes(b"no")
    with pytest.raises(RunError, match="make it again with `leret pairs"):
        learned(run)
