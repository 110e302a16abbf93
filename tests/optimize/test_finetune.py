import json
from concurrent.futures import CancelledError

import pytest
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus

import leret
from leret.core.errors import LeretError, PolicyError, RunError, TrainingError
from leret.optimize import finetune
from leret.optimize.finetune import ONE_TRAINING, train_examples
from leret.training.data import TrainingExample
from tests.optimize.conftest import QUESTIONS, greedy

KEYS = {"algorithm": "sft", "learning_rate": 1e-2, "per_device_train_batch_size": 2, "device": "cpu"}
EXAMPLES = [TrainingExample(str(i), ({"role": "user", "content": q},), ("paris",)) for i, q in enumerate(QUESTIONS)]
ROWS = [{"messages": [*one.prompt, {"role": "assistant", "content": "paris"}]} for one in EXAMPLES]


def test_a_policy_is_trained_once_and_named_by_what_it_follows_from(weights, tmp_path, monkeypatch):
    path = train_examples(str(weights), EXAMPLES, KEYS, tmp_path)
    assert path.parent == tmp_path / "policies"
    assert (json.loads((path / "training.json").read_text())["steps"], path.name[:4]) == (3, "sft-")
    monkeypatch.setattr("leret.training.stage.fit", None)
    assert train_examples(f"leret/{weights}", EXAMPLES, KEYS, tmp_path) == path
    others = (path, EXAMPLES, KEYS), (weights, EXAMPLES[1:], KEYS), (weights, EXAMPLES, {**KEYS, "seed": 1})
    for model, examples, keys in others:
        with pytest.raises(TypeError):  # fit is called
            train_examples(str(model), examples, keys, tmp_path)
    with pytest.raises(RunError, match="seed: 0 in the run, 1 in the recipe"):
        train_examples(str(weights), EXAMPLES, {**KEYS, "seed": 1, "name": path.name}, tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rat": 1}, "train_kwargs: learning_rat: .*did you mean learning_rate"),
        ({"algorithm": "grpo"}, "grpo needs a run's tasks to sample; for stored examples use sft, dpo or ipo"),
        ({"max_length": 2}, "none of 6 examples fits into 2 tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(weights, tmp_path, keys, message):
    with pytest.raises(LeretError, match=message):
        train_examples(str(weights), EXAMPLES, {**KEYS, **keys}, tmp_path)
    with pytest.raises(TrainingError, match="no examples to train on"):
        train_examples(str(weights), [], KEYS, tmp_path)
    with pytest.raises(PolicyError, match=r"model directory .* does not exist"):
        train_examples(str(tmp_path / "gone"), EXAMPLES, KEYS, tmp_path)


def test_a_job_waits_for_its_turn_and_gives_the_new_lm_or_cancelled_nothing(lm, tmp_path):
    with ONE_TRAINING:  # another training is at work
        job = lm.finetune(ROWS, TrainDataFormat.CHAT, KEYS)
        assert job.status() == TrainingStatus.pending
        other = lm.finetune(ROWS, TrainDataFormat.CHAT, {**KEYS, "run_dir": str(tmp_path / "run")})
        assert other.cancel() is True
    trained = job.result(60)
    assert (job.status(), job.cancel()) == (TrainingStatus.succeeded, False)
    assert type(trained) is leret.LM
    assert (trained.model != lm.model, greedy(trained) != greedy(lm)) == (True, True)
    other.thread.join(60)
    assert other.status() == TrainingStatus.cancelled
    with pytest.raises(CancelledError):
        other.result()
    assert not list((tmp_path / "run/policies").glob("*"))


def test_a_job_cancelled_at_work_stops_at_a_step_and_can_go_on(lm, tmp_path, monkeypatch):
    real, keys = finetune.train_job, {**KEYS, "run_dir": str(tmp_path)}

    def stopped(*arguments, **named):
        job.cancel()
        return real(*arguments, **named)

    monkeypatch.setattr(finetune, "train_job", stopped)
    with ONE_TRAINING:
        job = lm.finetune(ROWS, TrainDataFormat.CHAT, keys)
    job.thread.join(60)
    assert (job.status(), len(list(tmp_path.rglob("checkpoint-1")))) == (TrainingStatus.cancelled, 1)
    monkeypatch.setattr(finetune, "train_job", real)
    assert lm.finetune(ROWS, TrainDataFormat.CHAT, keys).result(60).provider.finetunable


def test_a_failed_job_gives_its_error_and_says_so(lm):
    job = lm.finetune(ROWS, TrainDataFormat.COMPLETION, KEYS)
    assert isinstance(job.result(60), TrainingError)
    assert job.status() == TrainingStatus.failed
    assert "only on chat data, not" in str(job.result())
