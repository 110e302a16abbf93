import json
from contextlib import closing
from dataclasses import dataclass, replace

import pytest

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import DataError, RetrievalError, TrainingError
from leret.core.runs import Run
from leret.core.types import Failure, Rollout
from leret.evaluation.stage import evaluate
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from leret.rollouts.environment import Environment
from leret.sampling.stage import sample
from leret.training.job import CheckpointDirectory
from leret.training.stage import train, train_job
from leret.training.stored.sft import SFTRecipe
from leret.training.validation import open_validation
from tests.evaluation.eval_fakes import asks
from tests.sampling.fakes import ROOT
from tests.training.training_runs import Stopper, changed, interrupt, job_in, record, sampled_run, weights_of

KEYS = {"learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 5, "logging_steps": 2, "eval_steps": 2}
SFT = SFTRecipe(per_device_train_batch_size=4, **KEYS)


@dataclass(frozen=True)
class Scribble:
    figures: tuple[float, ...]  # by step
    ids = frozenset()

    def run_model(self, model, tokenizer, step):
        with closing(LocalPolicy.over(model, tokenizer, name="scribble", digest=str(step))) as policy:
            policy.complete_many([Request(({"role": "user", "content": "the red book"},), (0,), 1.0, 8)])
        return {"eval_recall": self.figures[step // 2], "eval_unparsed": 0.0}


def job_of(run, recipe, *figures):
    plain = job_in(changed(recipe, eval_steps=None), run)  # a run by hand has no program to validate
    return replace(plain, recipe=recipe, validation=Scribble(figures))


def trained(run, recipe, *figures, progress=None):
    report = train_job(job_of(run, recipe, *figures), progress)
    return weights_of(report.path), record(report)


def curve(result):
    return [(e["step"], e["eval_recall"]) for e in result["log_history"] if "eval_recall" in e]


def test_the_best_step_is_published_also_by_a_training_that_was_stopped_and_moved(run, tmp_path, base):
    last = weights_of(train(changed(SFT, eval_steps=None), sampled_run(tmp_path / "plain", base)).path)
    increasing, _ = trained(sampled_run(tmp_path / "up", base), SFT, *(0.1 * i for i in range(7)))
    assert increasing == last, "a validation changes no weight"
    figures = (0.5, 0.9, 0.1, 0.1, 0.1, 0.9, 0.1)
    with pytest.raises(KeyboardInterrupt):
        trained(run, SFT, *figures, progress=Stopper(6, interrupt))
    moved = Run(run.path.rename(tmp_path / "moved"))
    best = weights_of(CheckpointDirectory(moved.policies, "sft").path / "checkpoint-2")
    weights, result = trained(moved, SFT, *figures)
    assert weights == best != last
    assert (result["best_step"], result["steps"]) == (2, 12)
    assert curve(result) == [*zip(range(0, 13, 2), figures, strict=True)]
    assert "from step 2, which has the best validation" in (moved.policies / "sft" / "README.md").read_text()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    small = ("data.options={n_dev: 24}", "data.limit=12", "sampling.prompts=1", "sampling.samples=3")
    recipe = load_recipe(str(ROOT / "sampling" / "demo.yaml"), SamplingRecipe, small)
    run = Run.create(tmp_path_factory.mktemp("world") / "run")
    sample(recipe, run)
    return run


def test_a_policy_is_validated_as_it_is_evaluated_and_not_on_the_same_tasks(world):
    dev = asks("base", split="dev", evaluation="dev")
    [row] = [row for row in evaluate(dev, world).summary["rows"] if row["system"] == "base"]
    recipe = SFTRecipe(learning_rate=1e-3, eval_steps=2, eval_tasks=24, per_device_train_batch_size=4)
    report = train(recipe, world)
    result = record(report)
    figures = dict(curve(result))
    assert figures[0] == pytest.approx(row["hops"][-1]["recall"])
    assert len(set(figures.values())) > 1
    assert len(result["validation"]) == 24
    with pytest.raises(DataError, match="24 questions are in both the training data"):
        evaluate(asks("base", split="dev", evaluation="again"), world)


def test_validation_tasks_are_not_trained_on_and_not_of_split_test(world):
    recipe = SFTRecipe(eval_steps=5, eval_split="train", eval_tasks=100_000, require_spread=False)
    test = set(json.loads(world.held_out.read_text()))
    chosen = open_validation(recipe, Environment.open(world), ())
    assert chosen.ids
    assert not chosen.ids & test
    with pytest.raises(TrainingError, match="eval_tasks"):
        job_in(recipe, world)
    few = job_in(changed(recipe, eval_tasks=8), world)
    assert few.validation.ids.isdisjoint(example.task_id for example in few.inputs)
    assert few.inputs == job_in(changed(recipe, eval_steps=None), world).inputs, "other tasks of the split do"


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_model_that_is_split_among_processes_is_not_validated(run, monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with pytest.raises(TrainingError, match="remove eval_steps"):
        train(SFT, run)


def test_an_outage_is_not_scored_as_a_failure_to_find(world):
    chosen = open_validation(SFTRecipe(eval_steps=5, eval_split="train", eval_tasks=4), Environment.open(world), ())
    lost = [Rollout(task.id, (), Failure("retrieval", "down")) for task in chosen.tasks]
    unparsed = [Rollout(task.id, (), Failure("parse", "?")) for task in chosen.tasks]
    assert chosen.figures([*unparsed[:3], lost[3]]) == {"eval_recall": 0.0, "eval_unparsed": 1.0}
    with pytest.raises(RetrievalError, match="3 of 4 validation tasks failed; the first failure: down"):
        chosen.figures([*lost[:3], unparsed[3]])
