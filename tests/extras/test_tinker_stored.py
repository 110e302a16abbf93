import pytest
import torch
from safetensors.torch import load_file

from leret.extras.tinker_training import TinkerDPO, TinkerIPO, TinkerSFT
from leret.training.algorithms import TrainingRecipe
from leret.training.stage import train
from tests.training.training_runs import changed, log

pytest.importorskip("tinker", reason="tinker is not installed")

SFT = TinkerSFT(
    engine="tinker", lora={"r": 4}, learning_rate=1e-3, max_steps=4, per_device_train_batch_size=8, save_steps=1,
    logging_steps=1, device="cpu",
)  # fmt: skip
PAIRS = SFT.model_dump(include=SFT.model_fields_set)
DPO = TinkerDPO(**PAIRS)
STEPS = {
    "sft": SFT,
    "dpo": changed(DPO, beta=0.3, losses={"dpo": 1, "sft": 0.2}),
    "token": TinkerIPO(**PAIRS, reduction="token", reward_margin=2),
}


@pytest.mark.parametrize("name", ["sft", "token", pytest.param("dpo", marks=pytest.mark.slow)])
def test_steps_equal_those_of_trl(tinker_run, base, stub, name):
    whole = changed(STEPS[name], max_steps=2, per_device_train_batch_size=100, learning_rate=1e-4)
    remote = train(whole, tinker_run)
    keys = {**whole.model_dump(), "name": "trl", "engine": "trl", "lora": None, "init_from": str(base)}
    local = train(TrainingRecipe.model_validate(keys), tinker_run)
    for ours, theirs in zip(log(remote), log(local)[:2], strict=True):
        for key in {"loss", "rewards/chosen", "rewards/margins"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), key
    trained, expected = stub.weights(remote), load_file(local.path / "model.safetensors")
    differences = torch.cat([(trained[key] - weight).detach().abs().flatten() for key, weight in expected.items()])
    assert differences.mean() < 1e-6  # Adam enlarges rounding errors of single weights
    asked = [request for request, _ in stub.requests].count("asample")
    assert asked == (0 if name == "sft" else 2 * remote.examples)  # the reference, once per completion
