import json
import math
from pathlib import Path

import pytest
from dspy.clients.utils_finetune import TrainDataFormat

from leret.core.errors import TrainingError
from leret.optimize.finetune import initial_policy
from leret.optimize.reinforce import N_IDS, GRPOJob, GRPOSettings, GRPOTraining
from tests.optimize.conftest import greedy

TEXTS = ("paris", "london is a city", "the new york", "alice bob")
SETTINGS = {"num_generations": 4, "learning_rate": 1e-2, "device": "cpu"}


def group(question="who wrote the book", rewards=(1.0, 0.0, 0.5, 0.0)):
    messages = [{"role": "user", "content": question}]
    made = zip(TEXTS, rewards, strict=False)
    return [{"messages": messages, "completion": {"role": "assistant", "content": t}, "reward": r} for t, r in made]


def batch(job, *groups):
    ids = job.get_status()["pending_batch_ids"]
    return [{"batch_id": id, "group": one} for id, one in zip(ids, groups, strict=False)]


@pytest.fixture
def job(lm, tmp_path):
    made = GRPOJob(lm=lm, train_kwargs={**SETTINGS, "run_dir": tmp_path})
    made.initialize()
    yield made
    made.terminate()


@pytest.mark.parametrize("scale", [True, False])
def test_a_step_is_an_update_by_the_advantages_of_its_groups(weights, monkeypatch, scale, tmp_path):
    settings, seen = GRPOSettings(**SETTINGS, scale_rewards=scale), []
    mine = GRPOTraining(initial_policy(str(weights)), settings, tmp_path)
    monkeypatch.setattr(mine._update, "step", lambda batch: seen.append(batch) or {"loss": 0.0, "grad_norm": 0.0})
    assert mine.step([group(), group("where", (0.0, 1.0))])
    [batch] = seen
    assert batch.groups.tolist() == [0, 0, 0, 0, 1, 1]
    by = [0.4787 + 1e-4] * 4 + [0.5**0.5 + 1e-4] * 2 if scale else [1.0] * 6
    expected = [x / y for x, y in zip((0.625, -0.375, 0.125, -0.375, -0.5, 0.5), by, strict=True)]
    assert batch.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-3)


def test_a_step_gives_the_lm_new_weights_in_place_and_frees_those_before(job, lm, weights):
    before, first, copied = lm.model, greedy(lm), lm.copy()
    job.step(train_data=batch(job, group()), train_data_format=TrainDataFormat.GRPO_CHAT)
    one, after_one = lm.model, greedy(lm)
    job.save_checkpoint("one")
    job.step(batch(job, group("where")))
    two = lm.model
    job.step(batch(job, group("what")))
    assert (after_one != first, greedy(copied), copied.model) == (True, first, before)
    assert len({before, one, two, lm.model}) == 4
    kept = [Path(name.removeprefix("leret/")).is_dir() for name in (before, one, two, lm.model)]
    assert kept == [True, True, False, True]
    status = {"checkpoints": {"one": one}, "last_checkpoint": "one", "current_model": lm.model}
    assert job.get_status().items() >= status.items()
    assert greedy(lm.copy(model=one)) == after_one
    record = json.loads((Path(lm.model.removeprefix("leret/")) / "training.json").read_text())
    assert (record["parent"], record["steps"], record["examples"]) == ("tiny", 3, 12)
    assert [entry["reward"] for entry in record["log_history"]] == [0.375] * 3


def test_a_step_without_two_rewards_in_a_group_changes_nothing(job, lm):
    before, ids = lm.model, job.get_status()["pending_batch_ids"]
    job.step(batch(job, group(rewards=(0.5,) * 4), group("where", (1.0,) * 4)))
    assert lm.model == before
    assert not {*ids} & {*job.get_status()["pending_batch_ids"]}


def test_every_group_is_trained_on_once_however_dspy_repeats_it(job, monkeypatch):
    seen = []
    monkeypatch.setattr(GRPOTraining, "step", lambda self, groups: seen.append(list(groups)) or False)
    a, b, c, d = (group(name) for name in "abcd")
    job.step(batch(job, a, b, a, b, a))
    job.step(batch(job, b, c, d, c, d))  # b was left in the queue
    job.step(batch(job, list(a)))  # equal, and another sample
    assert seen == [[a, b], [c, d], [a]]
    with pytest.raises(TrainingError, match="lower num_dspy_examples_per_grpo_step"):
        job.step(batch(job, *(list(a) for _ in range(N_IDS))))


def test_ids_are_never_given_twice_in_a_process(job, lm, tmp_path):
    other = lm.reinforce({**SETTINGS, "run_dir": tmp_path})
    assert not {*job.get_status()["pending_batch_ids"]} & {*other.get_status()["pending_batch_ids"]}
    assert other.directory != job.directory


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group("book " * 600)], "no sample fits into 512 tokens"),
        ([group(rewards=(math.inf, 0.0, 0.0, 0.0))], "the loss is nan.*lower learning_rate"),
    ],
)
def test_a_failed_step_is_an_error_and_ends_the_job(job, lm, groups, message):
    before = lm.model
    with pytest.raises(TrainingError, match=message):
        job.step(batch(job, *groups))
    assert (job.status()["status"], job.status()["pending_batch_ids"], lm.model) == ("failed", [], before)
    with pytest.raises(TrainingError, match=r"has ended \(failed\)"):
        job.step(batch(job, group()))


def test_a_job_ends_once_and_says_how(job, lm, tmp_path):
    job.cancel()
    job.terminate()
    assert job.get_status()["status"] == "cancelled"
    done = lm.reinforce({**SETTINGS, "run_dir": tmp_path})
    done.terminate()
    assert done.get_status()["status"] == "succeeded"


def test_an_adapter_is_trained_and_served(lm, tmp_path):
    job = lm.reinforce({**SETTINGS, "run_dir": tmp_path, "lora": {"r": 2, "alpha": 4}, "dtype": "bfloat16"})
    first = greedy(lm)
    for _ in range(3):
        job.step(batch(job, group()))
    assert greedy(lm) != first
    assert (Path(lm.model.removeprefix("leret/")) / "adapter_config.json").is_file()


def test_keys_that_it_does_not_take_are_refused(lm):
    with pytest.raises(TrainingError, match=r"learning_rate: must be greater than 0.*beta: unknown key; available: d"):
        lm.reinforce({"num_generations": 2, "beta": 0.04, "learning_rate": 0})


def test_several_processes_are_refused(weights, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="one process, not in 2; start it without a launcher"):
        GRPOTraining(initial_policy(str(weights)), GRPOSettings(**SETTINGS), tmp_path)
