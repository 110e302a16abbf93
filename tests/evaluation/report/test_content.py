"""Questions gained and lost most on, and what a run learned from."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.core.types import Document, Failure, Sample, State, Task
from leret.evaluation.report.content import TrainingData, curves_of, examples, training_data
from leret.evaluation.results import ScoredHop
from leret.sampling.store.schema import SamplingParams
from leret.sampling.store.store import Store

CORPUS = {"a": Document("a", "Ann", ""), "b": Document("b", "", "")}
QUESTIONS = [Task.question(f"q{i}", f"text {i}", gold=("a", "b")) for i in range(4)]


def rows(values, docs=("a",), failed=()):
    made = []
    for i, value in enumerate(values):
        question = f"q{i}"
        made.append(ScoredHop(question, None, 0, 1, "first", "first", (), (), {"ap": 0.0, "recall": 0.0}))
        made.append(ScoredHop(question, None, 0, 2, "second", "second", docs, (), {"ap": value, "recall": value}))
        if i in failed:
            made.append(ScoredHop(question, None, 0, 3, None, None, (), (), {}, failure="down"))
    return made


def test_the_widest_differences_come_first_and_equal_ones_are_left_out():
    shown = examples(("ipo", rows([1.0, 0.5, 0.0, 0.2])), ("base", rows([0.0, 0.0, 0.5, 0.2])), QUESTIONS, CORPUS, 10)
    assert [(e["question_id"], e["difference"]) for e in shown["improved"]] == [("q0", 1.0), ("q1", 0.5)]
    assert [(e["question_id"], e["difference"]) for e in shown["worsened"]] == [("q2", -0.5)]
    assert examples(("ipo", rows([1.0, 0.5])), ("base", rows([0.0, 0.0])), QUESTIONS, CORPUS, 1)["improved"][1:] == []
    ties = examples(("ipo", rows([1.0] * 4)), ("base", rows([0.0] * 4)), QUESTIONS[::-1], CORPUS, 2)["improved"]
    assert [e["question_id"] for e in ties] == ["q0", "q1"]


def test_a_hop_shows_what_it_added_and_marks_the_gold():
    shown = examples(("ipo", rows([1.0], ("x", "b"))), ("base", rows([0.0], ())), QUESTIONS, CORPUS, 10)["improved"][0]
    first, second = shown["policy"]
    assert (first["found"], first["query"]) == ([], "first")
    assert second["found"] == [{"title": "x", "gold": False}, {"title": "b", "gold": True}]
    assert shown["gold"] == ["Ann", "b"]
    assert shown["rival"][1]["found"] == []


def test_what_failed_is_not_compared():
    shown = examples(("ipo", rows([1.0, 1.0], failed=(0,))), ("base", rows([0.0, 0.0])), QUESTIONS, CORPUS, 10)
    assert [e["question_id"] for e in shown["improved"]] == ["q1"]


LOG = [
    {"step": i, "loss": 1 / i, "rewards/accuracies": 0.5, "rewards/chosen": 0.1 * i, "rewards/rejected": 0}
    for i in (1, 2, 3)
]


def test_curves_of_a_log():
    ((name, panels),) = curves_of({"ipo": {"log_history": LOG}, "sft": {"log_history": LOG[:1]}})
    assert (name, [title for title, _ in panels]) == (
        "ipo",
        ["loss", "chosen preferred to rejected, share", "implicit rewards"],
    )
    assert panels[0][1] == {"loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)]}


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
    found = training_data(run)
    assert found.rewards == {1: [0.5, 1.0], 2: [0.5, 0.5]}
    assert (found.n_states, found.n_spread, found.failures) == (2, 1, {"parse": 1})


def test_margins_by_hop(run):
    assert training_data(run) == TrainingData()
    run.preferences.mkdir()
    table = pa.table({"step": [0, 1], "score_chosen": [1.0, 0.5], "score_rejected": [0.5, 0.25], "prompt": ["a", "b"]})
    pq.write_table(table, run.preferences / "train.parquet")
    assert training_data(run).margins == {1: [0.5], 2: [0.25]}
    (run.preferences / "train.parquet").write_bytes(b"no")
    with pytest.raises(RunError, match="make it again with `leret pairs"):
        training_data(run)
