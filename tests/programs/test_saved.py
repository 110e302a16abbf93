"""A saved program comes back with its policy, adapter and retriever."""

from pathlib import Path

import dspy
import pytest

import leret
from leret.config.data import DataSettings
from leret.config.policy import LocalPolicySettings
from leret.config.retriever import BM25Settings
from leret.config.sampling import AdapterSettings
from leret.core.errors import ProgramError
from leret.programs.load import load_program
from leret.programs.saved import ProgramSource, save_program
from tests.sampling.fakes import FakeRetriever, write_data
from tests.tiny import tiny_policy

MULTIHOP = Path(__file__).parents[2] / "pipelines/multihop.py"


@pytest.fixture
def saved(tmp_path):
    write_data(tmp_path)
    source = ProgramSource(MULTIHOP, "MultiHop", {"hops": 2})
    save_program(
        tmp_path / "run/program",
        load_program(source.path, source.name, source.arguments),
        source,
        adapter=AdapterSettings(kind="compact"),
        policy=LocalPolicySettings(model=str(tiny_policy(tmp_path / "run/policies/sft")), max_tokens=4),
        retriever=BM25Settings(k=2, index=str(tmp_path / "run/cache/bm25")),
        data=DataSettings(corpus=str(tmp_path / "corpus.jsonl"), questions=str(tmp_path / "questions.jsonl")),
    )
    return tmp_path / "run/program"


class Outer(dspy.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, question):
        return self.inner(question=question)


def test_it_composes_runs_in_parallel_and_is_evaluated(saved):
    program = leret.load(saved)
    examples = [dspy.Example(question=f"alpha leads to {i}").with_inputs("question") for i in range(8)]
    with dspy.context(adapter=dspy.ChatAdapter(), lm=None):  # whatever DSPy is configured with
        alone = {example.question: program(**example.inputs()).doc_ids for example in examples}

    def same(example, prediction, trace=None):
        return prediction.doc_ids == alone[example.question]

    evaluation = dspy.Evaluate(devset=examples, metric=same, num_threads=4, display_progress=False)
    assert evaluation(Outer(program)).score == 100


def test_a_moved_run_still_loads_and_its_index_can_be_replaced(saved, tmp_path):
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    place = tmp_path / "elsewhere/program"
    assert leret.load(place)(question="alpha") is not None
    retriever = FakeRetriever()
    leret.load(place, retriever=retriever)(question="alpha")
    assert len(retriever.batches) == 2


def test_what_is_no_program_or_of_another_version_is_refused(tmp_path):
    with pytest.raises(ProgramError, match="not a saved program"):
        leret.load(tmp_path)
    (tmp_path / "policy.json").write_text('{"version": 99}')
    with pytest.raises(ProgramError, match="not of version 2"):
        leret.load(tmp_path)
