import json

import pytest
from safetensors.torch import load_file

from leret.core.errors import TrainingError
from leret.training.algorithms.sft import SFTRecipe
from leret.training.stage import train
from tests.training.training_runs import Stopper, changed, fail, log

pytest.importorskip("tinker", reason="tinker is not installed")

SFT = SFTRecipe(
    engine="tinker", lora={"r": 4}, learning_rate=1e-3, max_steps=4, per_device_train_batch_size=8, save_steps=1,
    logging_steps=1, device="cpu",
)  # fmt: skip


def weights(stub, report):
    saved = stub.saved[json.loads((report.path / "tinker.json").read_text())["weights"]]
    return dict(saved.network.named_parameters())


def test_a_step_equals_that_of_trl(tinker_run, base, stub):
    whole = changed(SFT, max_steps=1, per_device_train_batch_size=24, learning_rate=1e-4)
    remote = train(whole, tinker_run)
    local = train(changed(whole, name="trl", engine="trl", lora=None, init_from=str(base)), tinker_run)
    assert log(remote)[0]["loss"] == pytest.approx(log(local)[0]["loss"], abs=1e-5)
    ours, theirs = weights(stub, remote), load_file(local.path / "model.safetensors")
    assert max((ours[name] - weight).abs().max() for name, weight in theirs.items()) < 1e-5


def test_a_stopped_training_resumes(tinker_run, stub):
    with pytest.raises(ZeroDivisionError):
        train(SFT, tinker_run, progress=Stopper(3, fail))
    resumed = train(SFT, tinker_run)
    assert (resumed.resumed_from, resumed.steps, resumed.examples) == (2, 4, 24)
    straight = train(changed(SFT, name="straight"), tinker_run)
    assert log(resumed) == log(straight)
    assert all((weights(stub, resumed)[name] == one).all() for name, one in weights(stub, straight).items())


def test_a_run_of_another_policy_is_refused(run, stub):
    with pytest.raises(TrainingError, match=r"policy.kind tinker, not local"):
        train(SFT, run)
