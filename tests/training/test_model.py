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
from leret.policies.checkpoints import load_tokenizer, policy_directory
from leret.policies.load import make_policy
from leret.policies.local.chat_template import end_token
from leret.policies.local.model import load_model, load_weights, stop_ids
from leret.policies.serving.model import write_merged
from leret.training.algorithms import ALGORITHMS
from leret.training.data import RunSamples, TokenEncoder
from leret.training.model import InitialPolicy, find_initial, load_for_training
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from leret.training.stored.trainer import completion_logps
from tests.first_steps import leret
from tests.tiny import tiny_policy
from tests.training.training_runs import changed, fail, sampled_run, trainer_of

KEYS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "logging_steps": 1, "num_train_epochs": 2}
LORA = LoraSettings(r=4, alpha=8)
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


@pytest.mark.parametrize("algorithm", ["ipo", "kto"])
def test_a_second_training_of_an_adapter_has_one_base_and_the_first_as_reference(adapted, base, tmp_path, algorithm):
    run, sft = adapted
    entry = ALGORITHMS[algorithm]
    recipe = entry.settings(init_from="adapted", lora=LORA, per_device_train_batch_size=4)
    model, tokenizer = load_for_training(find_initial(run, "adapted"), LORA, "float32")
    encoded = TokenEncoder(tokenizer, end_token(tokenizer, stop_ids(model.generation_config))).encode(
        entry.examples(recipe, RunSamples(run))[:8]
    )
    trainer = trainer_of(recipe, model, base, tmp_path, encoded)
    assert trainer.ref_model is None
    n_adapter, n_base = (
        sum(value.numel() for value in part.values()) for part in (adapter(sft), load_file(base / "model.safetensors"))
    )
    assert sum(value.numel() for value in trainer.model.parameters()) == n_base + 2 * n_adapter
    row, prefix = trainer.train_dataset[0], {"ipo": "chosen_tokens", "kto": "completion_tokens"}[algorithm]
    with torch.no_grad():
        expected = float(completion_logps(model, row["prompt_tokens"], row[prefix]).sum())
        with model.disable_adapter():
            without = float(completion_logps(model, row["prompt_tokens"], row[prefix]).sum())
    reference = row["ref_chosen_logps" if algorithm == "ipo" else "ref_logps"]
    assert reference == pytest.approx(expected, rel=1e-5)
    assert abs(expected - without) > 0.1, "the adapter must differ from its base"
    trainer.train()
    after = dict(trainer.model.named_parameters())
    moved = {name for name, value in adapter(sft).items() if not torch.equal(value, after[named(name, "default")])}
    kept = {name for name, value in adapter(sft).items() if torch.equal(value, after[named(name, "ref")])}
    assert moved
    assert kept == set(adapter(sft))


def named(name, adapter):
    return name.replace(".weight", f".{adapter}.weight")


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


def test_a_merged_adapter_gives_the_adapters_logits_without_peft(adapted, tmp_path):
    _, sft = adapted
    assert write_merged(sft.path, tmp_path / "deep/merged") <= 1e-5
    files = {path.name for path in (tmp_path / "deep/merged").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert not any("adapter" in name for name in files)
    given = torch.arange(8, 40)[None]
    merged, expected = (
        load_model(path, LocalPolicySettings(device="cpu", dtype="float32")).network(input_ids=given).logits
        for path in (tmp_path / "deep/merged", sft.path)
    )
    assert torch.allclose(merged, expected, atol=1e-5)


def test_merging_is_a_command_that_overwrites_nothing(adapted, base, tmp_path):
    code, out = leret("merge", adapted[1].path, "--out", tmp_path / "merged")
    assert (code, "maximum logit difference" in out) == (0, True)
    code, out = leret("merge", adapted[1].path, "--out", tmp_path / "merged")
    assert (code, "already exists" in out) == (2, True)
    code, out = leret("merge", base, "--out", tmp_path / "other")
    assert (code, "is not an adapter but a full model" in " ".join(out.split())) == (2, True)


def test_an_adapter_that_does_not_merge_is_refused_and_leaves_nothing(adapted, tmp_path, monkeypatch):
    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(PolicyError, match=r"changes the logits by .* of the maximum"):
        write_merged(adapted[1].path, tmp_path / "out")
    assert not list(tmp_path.iterdir())


QLORA = LoraSettings(r=4, alpha=8, quantization="nf4")


def test_a_quantized_base_is_refused_without_a_gpu(adapted):
    with pytest.raises(TrainingError, match=r"lora\.quantization: nf4 needs a CUDA GPU, but no GPU"):
        load_for_training(find_initial(adapted[0], "base"), QLORA, "bfloat16")


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


def test_an_adapter_of_another_shape_is_refused(adapted):
    with pytest.raises(TrainingError, match=r"has r 4 and alpha 8, but the recipe has r 2 and alpha 8"):
        load_for_training(find_initial(adapted[0], "adapted"), LoraSettings(r=2, alpha=8), "float32")


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


ASKED = tuple(
    {"role": role, "content": text}
    for role, text in (("user", "question red"), ("assistant", "query blue"), ("user", "question green"))
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("gpt2") / "gpt2", "gpt2")


@pytest.fixture
def plain_run(tmp_path, gpt2):
    made = sampled_run(tmp_path / "run", gpt2)
    sampling = made.manifest.sampling
    made.update(sampling={**sampling, "policy": {**sampling["policy"], "template": "plain"}})
    return made


def sampled(directory, template):
    request = Request(ASKED, seeds=(1, 2, 3), temperature=1.0, max_tokens=8)
    with closing(make_policy(LocalPolicySettings(model=str(directory), template=template, device="cpu"))) as policy:
        return [completion.text for completion in asyncio.run(policy.complete(request))]


def test_plain_is_the_texts_of_the_messages_by_lines(gpt2):
    tokenizer = load_tokenizer(gpt2, "plain")
    how = {"tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(list(ASKED), **how)
    assert prompt == "question red\nquery blue\nquestion green\n"
    answer = {"role": "assistant", "content": "query sun"}
    assert tokenizer.apply_chat_template([*ASKED, answer], tokenize=False) == f"{prompt}query sun<|end|>"


def test_a_template_is_asked_for_and_none_is_replaced(gpt2, base):
    with pytest.raises(PolicyError, match=r"no chat template.*set policy\.template: plain"):
        sampled(gpt2, None)
    with pytest.raises(PolicyError, match=r"remove policy\.template"):
        sampled(base, "plain")


def test_gpt2_is_trained_on_what_it_samples_and_opens_again(plain_run, gpt2):
    before = sampled(gpt2, "plain")
    assert len(set(before)) == 3
    sft = train(SFTRecipe(**KEYS | {"num_train_epochs": 1}), plain_run)
    ipo = train(IPORecipe(init_from="sft", **KEYS | {"num_train_epochs": 1}), plain_run)
    assert (sft.examples, ipo.examples, ipo.loss_first) == (24, 48, pytest.approx(100.0))
    assert find_initial(plain_run, "ipo").template == "plain"
    after = sampled(ipo.path, "plain")
    assert after == sampled(ipo.path, None), "the saved policy has the template"
    assert after != before
