"""Where a training starts: the base, a policy of the run, a directory, an adapter; and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from leret.config.training import LoraSettings
from leret.core.bundled import policy_directory
from leret.core.errors import PolicyError, TrainingError
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.model import find_initial, load_for_training, pick_device
from leret.training.stage import train
from tests.training.training_runs import changed, sampled_run

KEYS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "logging_steps": 1, "num_train_epochs": 2}
LORA = LoraSettings(r=4, alpha=8)
SFT = SFTRecipe(**KEYS)
IPO = IPORecipe(init_from="adapted", **KEYS)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base):
    """A run with an adapter that SFT trained, and its report."""
    run = sampled_run(tmp_path_factory.mktemp("adapted") / "run", base)
    return run, train(changed(SFT, name="adapted", lora=LORA), run)


def adapter(report):
    return load_file(report.path / "adapter_model.safetensors")


def test_lora_leaves_an_adapter_that_names_its_base_and_goes_on_from_it(adapted, base):
    run, sft = adapted
    ipo = train(changed(IPO, lora=LORA), run)
    assert ipo.loss_first == pytest.approx(100.0), "the reference is the adapter that it started from"
    for report in (sft, ipo):
        assert report.loss_last < report.loss_first
        assert not (report.path / "model.safetensors").exists()
        assert json.loads((report.path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert adapter(sft).keys() == adapter(ipo).keys()
    assert any(not torch.equal(value, adapter(ipo)[name]) for name, value in adapter(sft).items())


def test_full_training_from_an_adapter_merges_it(adapted, base):
    run, sft = adapted
    model, _ = load_for_training(find_initial(run, "adapted"), None, "float32")
    assert not hasattr(model, "peft_config")
    assert all(parameter.requires_grad for parameter in model.parameters())
    weights, plain = model.state_dict(), load_file(base / "model.safetensors")
    moved = {name for name, value in plain.items() if not torch.equal(value, weights[name])}
    names = [name.removeprefix("base_model.model.") for name in adapter(sft) if "lora_A" in name]
    assert moved == {name.replace(".lora_A", "") for name in names}


def test_an_adapter_of_another_shape_is_refused(adapted):
    with pytest.raises(TrainingError, match=r"an adapter with r 4 and alpha 8, the recipe asks for r 2 and alpha 8"):
        load_for_training(find_initial(adapted[0], "adapted"), LoraSettings(r=2, alpha=8), "float32")


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        ({"kind": "local", "model": "/gone"}, PolicyError, r"gone is no longer there; set init_from"),
        ({"kind": "openai", "model": "big"}, TrainingError, r"sampled from 'big' on a server; .* set init_from"),
    ],
    ids=["lost", "served"],
)
def test_a_base_without_weights_here_asks_for_a_directory(run, policy, error, says):
    run.update(sampling={**run.manifest()["sampling"], "policy": policy})
    with pytest.raises(error, match=says):
        train(SFT, run)
    for name in ("demo", "agent"):
        assert find_initial(run, name).directory == policy_directory(name)


def test_a_base_that_changed_since_it_was_sampled_is_refused(run):
    run.update(rounds=[{"policy": "base", "model": "base", "digest": "f" * 32}])
    with pytest.raises(TrainingError, match=r"is no longer the one that .* was sampled from"):
        train(SFT, run)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(TrainingError, match="device: tpu is not available"):
        pick_device("tpu")
