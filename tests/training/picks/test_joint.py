from contextlib import closing

import pytest

import leret
from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, TrainingError
from leret.evaluation.stage import evaluate
from leret.sampling.stage import sample
from leret.training.algorithms import ALGORITHMS
from leret.training.picks.joint import JointRecipe
from leret.training.picks.pick import PickRecipe
from leret.training.rounds.grpo import GRPORecipe
from leret.training.rounds.loop import RoundLoop
from leret.training.stage import estimate, train
from tests.training.training_runs import changed, crash, job_in, log, record, weights_of

JOINT = JointRecipe(
    questions_per_round=4, max_steps=4, logging_steps=1, save_steps=1, device="cpu",
    picker={"num_generations": 3, "learning_rate": 1e-2, "temperature": 1.0},
    writer={"num_generations": 2, "learning_rate": 1e-3},
)  # fmt: skip


def test_two_policies_are_saved_evaluated_loaded_and_trained_on(dialogue_run, tmp_path):
    sample(job_in(JOINT, dialogue_run).environment.recipe, run := dialogue_run)
    recipe = changed(JOINT, max_steps=2, eval_steps=2, eval_split="train", eval_tasks=2, metric_for_best_model="f1")
    report = train(recipe, run)
    assert record(report)["best_step"] == 2
    assert record(report)["parent"] == "base"
    assert {path.name for path in report.path.iterdir() if path.is_dir()} == {"picker", "writer"}
    assert train(recipe, run).already
    evaluated = evaluate(EvalRecipe(systems=("base", "joint"), measures=("f1", "recall"), resamples=20), run)
    assert [row["system"] for row in evaluated.summary["rows"]] == ["base", "joint"]
    program = leret.load(run.program)
    assert program.program.pick.actor.settings.model == str((report.path / "picker").resolve())
    task = next(iter(job_in(JOINT, run).environment.tasks("test")))
    reply = program(**task.inputs).reply
    program.save(tmp_path / "saved")
    saved = leret.load(tmp_path / "saved", retriever=program.program.search.retriever)
    assert saved(**task.inputs).reply == reply
    assert saved.program.pick.actor.digest == program.program.pick.actor.digest
    for kind, actor in ((PickRecipe, "picker"), (GRPORecipe, "writer")):
        initial = job_in(kind(name="next", init_from="joint", limit=4), run).initial
        assert (initial.directory, initial.total_steps) == (run.policies / "joint" / actor, 2)
    actors = {a: {**getattr(JOINT, a).model_dump(), "init_from": "joint"} for a in ("picker", "writer")}
    again = changed(JOINT, name="more", **actors)
    assert estimate(again, run).steps == 4
    assert job_in(again, run).initial.actors["picker"].directory == run.policies / "joint" / "picker"


def bits(report):
    return [weights_of(report.path / actor) for actor in ("picker", "writer")], log(report)


def open_loop(job):
    return closing(RoundLoop(job, ALGORITHMS["joint"].make_learner, "cpu"))


def test_a_pick_is_worth_the_mean_of_its_replies(dialogue_run):
    with open_loop(job_in(JOINT, dialogue_run)) as loop:
        sampled = loop._sample(0)
    picks, replies = sampled.of(["pick"]), sampled.of(["reply"])
    names = [(group, name) for group, (_, name) in zip(picks.groups.tolist(), picks.sequences, strict=True)]
    distinct = [*dict.fromkeys(names)]
    assert len(names) == 4 * 3
    assert replies.groups.tolist() == [i // 2 for i in range(2 * len(distinct))]
    assert len(replies.sequences) == sampled.metrics["num_samples"]
    worth = dict(zip(distinct, replies.rewards.reshape(-1, 2).mean(1).tolist(), strict=True))
    assert picks.rewards.tolist() == pytest.approx([worth[name] for name in names])
    assert max(replies.walks) == max(picks.walks) == 3


def test_a_training_begins_at_ratio_one_and_goes_on_after_a_crash_to_the_same_bits(dialogue_run):
    recipe = changed(JOINT, max_steps=3)
    crash(dialogue_run, recipe, 2)
    resumed = train(recipe, dialogue_run)
    assert resumed.resumed_from == 1
    assert bits(resumed) == bits(train(changed(recipe, name="straight"), dialogue_run))
    first, second, _ = log(resumed)
    assert "pick/val/ratio" not in first  # a picker from scratch has no weights yet
    assert (first["val/ratio"], second["pick/val/ratio"]) == pytest.approx((1, 1), abs=1e-5)
    assert second["pick/learning_rate"] > 5 * second["learning_rate"]  # each section has its keys
    assert {"pick/reward", "pick/grad_norm", "completions/length_ratio"} <= second.keys()


def test_predictors_are_split_and_a_program_without_a_writer_after_the_pick_or_a_picker_is_refused(dialogue_run):
    recipe = job_in(JOINT, dialogue_run).recipe
    assert (recipe.picker.predictors, recipe.writer.predictors) == (("pick",), ("reply",))
    writer = recipe.writer.model_copy(update={"predictors": ("nothing",)})
    job = job_in(recipe.model_copy(update={"writer": writer, "predictors": ("pick",)}), dialogue_run)
    with open_loop(job) as loop, pytest.raises(ConfigError, match="writes after a pick"):
        loop._sample(0)
    section = dialogue_run.sampling()
    dialogue_run.update(sampling={**section, "policies": {"pick": {"kind": "local", "model": "demo"}}})
    with pytest.raises(TrainingError, match=r"joint trains .* but no predictor"):
        job_in(JOINT, dialogue_run)
