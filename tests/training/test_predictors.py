"""Programs of several predictors: which of them are trained, on whole trajectories or on reference answers."""

import json

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.sampling.rollouts.environment import Environment
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.algorithms.kto import KTORecipe
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.stage import make_job, train

PROGRAM = """
import dspy
import leret

class Answering(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question -> query")
        self.answer = dspy.Predict("question, context: list[str] -> answer")
        self.search = leret.Search(k=2)

    def forward(self, question):
        found = self.search(self.write(question=question).query)
        return self.answer(question=question, context=found.passages)
"""
RECIPE = {
    "data": {"kind": "world", "options": {"n_train": 20, "n_dev": 5, "n_test": 5}, "limit": 8},
    "policy": {"kind": "local", "model": "demo", "max_tokens": 12},
    "sampling": {"prompts": 1, "samples": 4, "reward": "recall"},
}


@pytest.fixture(scope="module", params=["auto", "final"])
def sampled(request, tmp_path_factory):
    """The credit, and a run of a program that searches once and then answers."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "program.py").write_text(PROGRAM)
    program = {"path": f"{directory}/program.py:Answering", "adapter": {"kind": "compact"}}
    sampling = RECIPE["sampling"] | {"credit": request.param}
    run = Run.create(directory / "run")
    assert sample(SamplingRecipe.model_validate({**RECIPE, "program": program, "sampling": sampling}), run).pairs > 0
    return request.param, run


def predictors(run, examples):
    """Of the states whose prompts are trained."""
    with Store(run.store, read_only=True) as store:
        by_prompt = {json.dumps(list(group.state.messages)): group.state.predictor for group in store.groups()}
    return {by_prompt[json.dumps(list(example.prompt))] for example in examples}


@pytest.mark.parametrize("recipe", [SFTRecipe, IPORecipe, KTORecipe])
def test_samples_of_the_named_predictors_alone_are_trained(sampled, recipe):
    credit, run = sampled
    named = make_job(recipe(predictors=("write",), require_spread=False) if recipe is SFTRecipe else
                     recipe(predictors=("write",)), run)  # fmt: skip
    assert predictors(run, named.examples) == {"write"}
    missing = ("answer", "gone") if credit == "auto" else ("gone",)  # under auto nothing is learnt at answer
    with pytest.raises(TrainingError, match=rf"predictors: nothing to train on of {', '.join(missing)}; the run has"):
        make_job(recipe(predictors=("write", *missing)), run)


def test_pairs_of_credit_final_compare_what_whole_programs_came_to(sampled):
    credit, run = sampled
    with Store(run.store, read_only=True) as store:
        writes = [group for group in store.finished() if group.state.predictor == "write"]
    for one in (one for group in writes for one in group.samples if one.reward is not None):
        assert ("final" in one.components) is (credit == "final")
        assert one.reward == one.components["final" if credit == "final" else "recall"]
    report = train(IPORecipe(name="pairs", max_steps=2, learning_rate=1e-4, per_device_train_batch_size=2), run)
    assert (report.steps, report.examples > 0) == (2, True)


def test_the_reference_answer_is_the_target_where_a_predictor_writes_it(sampled):
    run = sampled[1]
    examples = make_job(SFTRecipe(targets="answer"), run).examples
    answers = {task.id: task.answers[0] for task in Environment.open(run).questions()}
    assert predictors(run, examples) == {"answer"}
    assert {example.completions for example in examples} <= {(answer,) for answer in answers.values()}
    assert all(example.completions == (answers[example.question_id],) for example in examples)
    with pytest.raises(TrainingError, match=r"writes story alone \(write writes query; answer writes answer\)"):
        make_job(SFTRecipe(targets="answer", field="story"), run)
