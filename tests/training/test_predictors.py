import json

import pytest

from leret.core.errors import ConfigError, PolicyError, RunError, TrainingError
from leret.core.runs import Run
from leret.policies.checkpoints import policy_directory
from leret.rollouts.environment import Environment
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.model import find_initial
from leret.training.picks.pick import PickRecipe
from leret.training.stored.kto import KTORecipe
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.sampling.fakes import ROOT
from tests.training.training_runs import job_in, world_recipe

ANSWERING = f"{ROOT}/tests/optimize/fakes.py:Answering"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("sampled") / "run")
    assert sample(several(), run).pairs > 0
    return run


def predictors(run, examples):
    with Store(run.store, read_only=True) as store:
        by_prompt = {json.dumps(list(group.state.messages)): group.state.predictor for group in store.groups()}
    return {by_prompt[json.dumps(list(example.prompt))] for example in examples}


@pytest.mark.parametrize("recipe", [SFTRecipe, IPORecipe, KTORecipe])
def test_samples_of_the_named_predictors_alone_are_trained(run, recipe):
    assert predictors(run, job_in(recipe(predictors=("write",)), run).inputs) == {"write"}
    with pytest.raises(TrainingError, match="predictors: the run has no samples of gone; choose"):
        job_in(recipe(predictors=("write", "gone")), run)


def test_targets_are_reference_answers_or_starts_of_gold_documents(run):
    with Environment.open(run) as environment:
        tasks = environment.tasks()
        answers = {task.id: task.answers[0] for task in tasks}
        starts = {task.id: " ".join(environment.corpus[task.gold[0]].text.split()[:5]) for task in tasks}
    for predictor, expected, keys in (
        ("answer", answers, {"targets": "answer"}),
        ("write", starts, {"targets": "document", "field": "query", "max_words": 5}),
    ):
        examples = job_in(SFTRecipe(**keys), run).inputs
        assert predictors(run, examples) == {predictor}
        assert all(example.completions == (expected[example.task_id],) for example in examples)
    with pytest.raises(TrainingError, match=r"writes only 'story' \(write writes query; answer writes answer\)"):
        job_in(SFTRecipe(targets="answer", field="story"), run)
    with pytest.raises(TrainingError, match=r"targets: document needs .* gold documents \(\d+ of \d+ have one\)"):
        job_in(SFTRecipe(targets="document", field="story"), run)


def several(**policies):
    return world_recipe(ANSWERING, policies=policies, samples=4, reward="recall", credit="final")


GREEDY = {"model": "agent", "temperature": 0.0, "max_tokens": 6}


def test_each_predictor_may_have_its_own_policy(tmp_path):
    run = Run.create(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"policies\.reply: .* available in the program: write, answer"):
        sample(several(reply=GREEDY), run)
    sample(several(answer=GREEDY), run)
    assert sample(several(answer={**GREEDY, "device": "cpu"}), run).new_samples == 0
    with pytest.raises(RunError, match=r"policies\.answer\.max_tokens: 6 in the run, 7"):
        sample(several(answer={**GREEDY, "max_tokens": 7}), run)
    with Store(run.store, read_only=True) as store:
        groups = {name: [g for g in store.groups() if g.state.predictor == name] for name in ("write", "answer")}
        [policy] = {group.policy_digest for group in store.groups()}
    assert policy == run.manifest.digests["policy"]
    assert {len(group.samples) for group in groups["write"]} == {4}
    assert {(len(g.samples), g.samples[0].is_sampled) for g in groups["answer"]} == {(1, False)}  # it is greedy
    job = job_in(IPORecipe(), run)
    assert job.recipe.predictors == ("write",)
    assert predictors(run, job.inputs) == {"write"}
    for name, model in (("write", "demo"), ("answer", "agent")):
        assert find_initial(run, "base", (name,)).directory == policy_directory(model).resolve()
    with pytest.raises(PolicyError, match="train one predictor at a time"):
        job_in(IPORecipe(predictors=("write", "answer")), run)
    with pytest.raises(TrainingError, match="pick trains a picker, but no predictor"):
        job_in(PickRecipe(), run)
