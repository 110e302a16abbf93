import json
from contextlib import closing

import pytest
import torch

import leret
from leret.config.evaluation import EvalRecipe
from leret.config.sampling import RewardSettings
from leret.core.errors import ConfigError, PolicyError, RunError, TrainingError
from leret.core.runs import Run
from leret.evaluation.stage import evaluate
from leret.policies.checkpoints import policy_directory
from leret.policies.load import make_policy
from leret.rollouts.environment import Environment, training_tasks
from leret.rollouts.rounds import RoundSampler
from leret.sampling.estimate import estimate
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.model import find_initial
from leret.training.picks.pick import PickRecipe
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from leret.training.stored.kto import KTORecipe
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.sampling.fakes import ROOT
from tests.training import stories
from tests.training.training_runs import job_in, world_recipe

ANSWERING, MIXED = f"{ROOT}/tests/optimize/fakes.py:Answering", f"{stories.__file__}:Mixed"


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Runs by how their samples are credited."""
    runs = {credit: Run.create(tmp_path_factory.mktemp(credit) / "run") for credit in ("auto", "final")}
    for credit, run in runs.items():
        assert sample(several(credit=credit), run).pairs > 0
    return runs


def predictors(run, examples):
    with Store(run.store, read_only=True) as store:
        by_prompt = {json.dumps(list(group.state.messages)): group.state.predictor for group in store.groups()}
    return {by_prompt[json.dumps(list(example.prompt))] for example in examples}


@pytest.mark.parametrize("recipe", [SFTRecipe, IPORecipe, KTORecipe])
def test_samples_of_the_named_predictors_alone_are_trained(sampled, recipe):
    run = sampled["auto"]
    assert predictors(run, job_in(recipe(predictors=("write",)), run).inputs) == {"write"}
    # under auto nothing is learnt at answer
    with pytest.raises(TrainingError, match="predictors: the run has no samples of answer, gone; choose"):
        job_in(recipe(predictors=("write", "answer", "gone")), run)


@pytest.mark.parametrize("credit", ["auto", "final"])
def test_pairs_of_credit_final_compare_what_whole_programs_came_to(sampled, credit):
    run = sampled[credit]
    with Store(run.store, read_only=True) as store:
        writes = [group for group in store.finished(run.manifest.policy_digest) if group.state.predictor == "write"]
    for one in (one for group in writes for one in group.samples if one.reward is not None):
        assert ("final" in one.components) is (credit == "final")
        assert one.reward == one.components["final" if credit == "final" else "recall"]
    report = train(IPORecipe(name="pairs", max_steps=2, learning_rate=1e-4, per_device_train_batch_size=2), run)
    assert (report.steps, report.examples > 0) == (2, True)


def test_rounds_sample_the_named_predictors_and_credit_steps_the_end_or_both(sampled):
    run, found = sampled["final"], {}
    with Environment.open(run) as environment, closing(make_policy(environment.recipe.policy)) as policy:
        for credit in ("step", "final", "both"):
            reward = RewardSettings(parts={"recall": 1.0, "steps": 0.5})  # 0 at the first LM call, -0.5 at the end
            recipe = GRPORecipe(predictors=("write",), num_generations=4, credit=credit, reward=reward)
            with closing(RoundSampler(recipe, environment, run, policy)) as sampler:
                found[credit] = sampler.sample(training_tasks(environment, recipe)[:4], 0)
        weight = environment.recipe.sampling.final_weight
    assert all(one.groups.tolist() == [place // 4 for place in range(16)] for one in found.values())
    step, final, both = found.values()
    assert step.sequences == final.sequences == both.sequences
    assert [one.at_end for one in found.values()] == [False, True, False]
    assert len(set(step.rewards.tolist())) > 1
    assert final.rewards.tolist() != step.rewards.tolist()
    assert both.rewards.tolist() == pytest.approx(torch.lerp(step.rewards, final.rewards, weight).tolist())


def test_targets_are_reference_answers_or_starts_of_gold_documents(sampled):
    run = sampled["final"]
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


def several(program=ANSWERING, credit="final", **policies):
    return world_recipe(program, policies=policies, samples=4, reward="recall", credit=credit)


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


def test_a_program_that_writes_and_picks_is_trained_part_by_part(tmp_path):
    run, picker = Run.create(tmp_path / "run"), {"kind": "features", "features": f"{stories.__name__}:numbers"}
    recipe = several(MIXED, "auto", pick=picker)
    assert estimate(recipe, run).steps > 0
    assert sample(recipe, run).policy == "demo, pick: features"
    with Store(run.store, read_only=True) as store:
        picks = [one for g in store.groups() if g.state.predictor == "pick" for one in g.samples]
    assert {tuple(sorted(one.components)) for one in picks} == {("ap", "logp", "q", "recall")}
    train(PickRecipe(name="picker", questions_per_round=4, max_steps=1, num_generations=2), run)
    assert job_in(IPORecipe(), run).recipe.predictors == ("write",)
    report = evaluate(EvalRecipe(systems=("base", "picker"), limit=2, resamples=20), run)
    assert [row["system"] for row in report.summary["rows"]] == ["base", "picker"]
    program, question = leret.load(run.program), "Where was the author of the novel The Restless Engine born?"
    assert program.program.pick.actor.settings.model == str((run.policies / "picker").resolve())
    assert program.predictors()[0].lm.model == "leret/demo"
    program.save(tmp_path / "saved")
    again = leret.load(tmp_path / "saved", retriever=program.program.search.retriever)
    assert again.program.pick.actor.digest == program.program.pick.actor.digest
    assert str(tmp_path / "saved/policies/picker-") in again.program.pick.actor.settings.model
    assert again(question=question).doc_ids == program(question=question).doc_ids
