import asyncio
import json
from contextlib import closing

import pytest
import torch
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file

from leret.config.policy import LocalPolicySettings
from leret.config.training import LoraSettings
from leret.core.errors import PolicyError, TrainingError
from leret.policies.base import Request
from leret.policies.checkpoints import policy_directory
from leret.policies.load import make_policy
from leret.policies.local.model import load_weights
from leret.policies.serving.model import write_merged
from leret.training.model import InitialPolicy, find_initial, load_for_training
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.first_steps import refused, succeeds
from tests.tiny import tiny_policy
from tests.training.training_runs import changed, fail, sampled_run

KEYS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "logging_steps": 1, "num_train_epochs": 2}
LORA = LoraSettings(r=4, alpha=8)
WEIGHTS = "model.safetensors"
SFT = SFTRecipe(**KEYS)
IPO = IPORecipe(init_from="adapted", **KEYS)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base):
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


@pytest.mark.parametrize(("arch", "template"), [("opt", None), ("gpt2", "plain")])
def test_a_model_with_dropout_computes_in_training_as_in_evaluation(tmp_path, arch, template):
    path = tiny_policy(tmp_path / arch, arch)
    model, _ = load_for_training(InitialPolicy(arch, path, "", template=template), None, "float32")
    ids = torch.arange(8, 40)[None]
    trained = model(input_ids=ids).logits
    assert model.training
    assert torch.equal(trained, model.eval()(input_ids=ids).logits)
    drawn = load_weights(path, "float32").train()
    assert not torch.equal(drawn(input_ids=ids).logits, trained)


def test_merging_is_a_command_that_overwrites_nothing(adapted, base, tmp_path):
    merge = "merge", adapted[1].path, "--out", tmp_path / "deep/merged"
    assert "maximum logit difference" in succeeds(*merge)
    files = {path.name for path in (tmp_path / "deep/merged").iterdir()}
    assert {WEIGHTS, "config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert "already exists" in refused(*merge)
    assert "is not an adapter but a full model" in " ".join(refused("merge", base, "--out", tmp_path / "x").split())


def test_an_adapter_that_does_not_merge_is_refused_and_leaves_nothing(adapted, tmp_path, monkeypatch):
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(PolicyError, match=r"changes the logits by .* of the maximum"):
        write_merged(adapted[1].path, tmp_path / "out")
    assert not list(tmp_path.iterdir())


QLORA = LoraSettings(r=4, alpha=8, quantization="nf4")


@pytest.mark.parametrize(
    ("start", "lora", "says"),
    [
        ("base", QLORA, r"lora\.quantization: nf4 needs a CUDA GPU, but no GPU"),
        ("adapted", LoraSettings(r=2, alpha=8), "has r 4 and alpha 8, but the recipe has r 2 and alpha 8"),
    ],
)
def test_an_adapter_that_does_not_fit_the_initial_policy_or_the_machine_is_refused(adapted, start, lora, says):
    with pytest.raises(TrainingError, match=says):
        load_for_training(find_initial(adapted[0], start), lora, "bfloat16")


def test_a_quantized_base_is_loaded_in_four_bits_on_the_processs_gpu(adapted, monkeypatch):
    loaded = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("leret.training.model.find_spec", lambda name: name)
    monkeypatch.setattr("leret.training.model.load_weights", lambda *given, **more: loaded.update(more) or fail())
    with pytest.raises(ZeroDivisionError):
        load_for_training(find_initial(adapted[0], "base"), QLORA, "bfloat16")
    config = loaded["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert loaded["device_map"] == {"": 1}


def test_full_training_from_an_adapter_merges_it(adapted, base):
    run, sft = adapted
    model, _ = load_for_training(find_initial(run, "adapted"), None, "float32")
    assert not hasattr(model, "peft_config")
    assert all(parameter.requires_grad for parameter in model.parameters())
    weights, plain = model.state_dict(), load_file(base / "model.safetensors")
    moved = {name for name, value in plain.items() if not torch.equal(value, weights[name])}
    names = [name.removeprefix("base_model.model.") for name in adapter(sft) if "lora_A" in name]
    assert moved == {name.replace(".lora_A", "") for name in names}


SERVED = {"kind": "openai", "model": "big", "urls": ["http://127.0.0.1:1/v1"]}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"kind": "local", "model": "/gone"}, "gone does not exist; replace `base`"),
        (SERVED, "sampled from 'big' on a server, .* the directory of the weights"),
    ],
)
def test_a_base_without_weights_here_asks_for_a_directory(run, policy, says):
    run.update(sampling={**run.manifest.sampling, "policy": policy})
    with pytest.raises(PolicyError, match=says):
        train(SFT, run)
    for name in ("demo", "agent"):
        assert find_initial(run, name).directory == policy_directory(name)


def test_a_base_that_changed_since_it_was_sampled_is_refused(run):
    run.update(rounds=[{"policy": "base", "model": "base", "digest": "f" * 32}])
    with pytest.raises(TrainingError, match=r"is no longer the one that .* was sampled from"):
        train(SFT, run)


def sampled(directory, template):
    roles = ("user", "question red"), ("assistant", "query blue"), ("user", "question green")
    messages = tuple({"role": role, "content": text} for role, text in roles)
    request = Request(messages, seeds=(1, 2, 3), temperature=1.0, max_tokens=8)
    with closing(make_policy(LocalPolicySettings(model=str(directory), template=template, device="cpu"))) as policy:
        return [completion.text for completion in asyncio.run(policy.complete(request))]


def test_gpt2_is_trained_with_the_template_that_it_is_asked_for_and_opens_again(tmp_path, base):
    gpt2 = tiny_policy(tmp_path / "gpt2", "gpt2")
    with pytest.raises(PolicyError, match=r"no chat template.*set policy\.template: plain"):
        sampled(gpt2, None)
    with pytest.raises(PolicyError, match=r"remove policy\.template"):
        sampled(base, "plain")
    plain_run = sampled_run(tmp_path / "run", gpt2)
    sampling = plain_run.manifest.sampling
    plain_run.update(sampling={**sampling, "policy": {**sampling["policy"], "template": "plain"}})
    before = sampled(gpt2, "plain")
    assert len(set(before)) == 3
    sft = train(SFTRecipe(**KEYS | {"num_train_epochs": 1}), plain_run)
    ipo = train(IPORecipe(init_from="sft", **KEYS | {"num_train_epochs": 1}), plain_run)
    assert (sft.examples, ipo.examples, ipo.loss_first) == (24, 48, pytest.approx(100.0))
    assert find_initial(plain_run, "ipo").template == "plain"
    after = sampled(ipo.path, "plain")
    assert after == sampled(ipo.path, None), "the saved policy has the template"
    assert after != before
