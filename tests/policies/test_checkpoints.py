from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leret.core.errors import PolicyError
from leret.policies.checkpoints import find_model, load_model, load_tokenizer, load_weights, model_digest
from leret.policies.local.chat_template import load_template
from leret.policies.local.policy import LocalPolicy
from tests.policies.conftest import ask


@pytest.fixture
def copy(llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_dir, tmp_path / "copy"))


def change_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def load(path: Path) -> object:
    return load_model(find_model(path), device="cpu", dtype="auto")


def cut_short(path: Path, n_bytes: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:n_bytes])


def leave_out(path: Path, name: str) -> None:
    weights = load_file(path / "model.safetensors")
    del weights[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def index(path: Path, file: str) -> None:
    names = {"metadata": {}, "weight_map": {"lm_head.weight": file}}
    (path / "model.safetensors.index.json").write_text(json.dumps(names))


def unlink(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, r"no model directory .*copy"),
        (lambda path: unlink(path, "config.json"), r"neither config\.json"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            r"only pytorch_model\.bin, which leret does not unpickle",
        ),
        (lambda path: cut_short(path, 0), "damaged or cut short"),
        (lambda path: cut_short(path, 20), "damaged or cut short"),
        (lambda path: cut_short(path, 5000), "damaged or cut short"),
        (lambda path: leave_out(path, WEIGHT), rf"lacks 1 of the model's weights \({re.escape(WEIGHT)}\)"),
        (lambda path: change_config(path, intermediate_size=96), "cannot be loaded|lacks"),
        (lambda path: index(path, "model-00002-of-00002.safetensors"), r"lacks model-00002-of-00002\.safetensors"),
        (
            lambda path: change_config(path, model_type="mystery", architectures=["MysteryForCausalLM"]),
            "mystery.*use kind: openai",
        ),
        (
            lambda path: unlink(path, "tokenizer.json", "tokenizer_config.json"),
            "no tokenizer that can be loaded",
        ),
        (lambda path: unlink(path, "chat_template.jinja"), "no chat template"),
    ],
)
def test_what_is_no_whole_model_is_refused(copy: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(copy)
    with pytest.raises(PolicyError, match=says):
        load(copy)


@pytest.mark.parametrize("names", ["index", "config"])
def test_weights_in_a_folder_are_refused_for_no_digest_has_them(copy: Path, names: str) -> None:
    (copy / "sub").mkdir()
    (copy / "model.safetensors").rename(copy / "sub" / "model.safetensors")
    save_file({"decoy": torch.zeros(1)}, copy / "decoy.safetensors")
    if names == "config":
        change_config(copy, transformers_weights="sub/model.safetensors")
    else:
        index(copy, "sub/model.safetensors")
    with pytest.raises(PolicyError, match=r"lacks sub/model\.safetensors"):
        load(copy)


@pytest.mark.parametrize(
    "load_it",
    [load_tokenizer, lambda path: load_weights(path, "float32"), lambda path: load_template(str(path))],
    ids=["tokenizer", "weights", "template"],
)
def test_no_code_of_a_model_is_run_whatever_is_typed(
    copy: Path, monkeypatch: pytest.MonkeyPatch, load_it: Callable[[Path], object]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # which transformers asks for where nobody has decided
    (copy / "evil.py").write_text(f"open({str(copy / 'written')!r}, 'w')\nclass Evil: pass\n")
    change_config(copy, model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    (copy / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    with pytest.raises(PolicyError, match="custom code"):
        load_it(copy)
    assert not (copy / "written").exists()


def test_a_policy_whose_pretraining_was_stopped_is_called_half_made(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_model(copy)
    assert not caplog.records
    (copy / "state.safetensors").write_bytes((copy / "model.safetensors").read_bytes())
    find_model(copy)
    assert caplog.messages[0].startswith(f"{copy} is half made")


def test_a_device_that_is_not_here_is_told(llama_dir: Path) -> None:
    with pytest.raises(PolicyError, match="device nonsense"):
        load_model(llama_dir, device="nonsense", dtype="auto")


def test_the_digest_follows_the_bytes_and_not_the_place(llama_dir: Path, copy: Path) -> None:
    assert model_digest(copy) == model_digest(llama_dir)
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    changed = model_digest(copy)
    assert changed != model_digest(llama_dir)
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert model_digest(copy) != changed


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"adapter_model.bin", "decoy.safetensors"},
            r"an adapter is adapter_model\.safetensors.*\(adapter_model\.bin\)",
        ),
        ({"adapter_model.bin", "adapter_model.safetensors"}, r"pickled weights .*\(adapter_model\.bin\)"),
        ({"training_args.bin", "adapter_model.safetensors"}, None),
    ],
    ids=["pickled", "both", "a trainer's own"],
)
def test_an_adapter_is_of_safetensors_alone(tmp_path: Path, files: set[str], says: str | None) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for name in files:
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    if says is None:
        assert find_model(tmp_path) == tmp_path
    else:
        with pytest.raises(PolicyError, match=says):
            find_model(tmp_path)


def test_an_adapter_runs_merged_into_its_base(llama_dir: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(llama_dir)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    policy, plain = LocalPolicy(tmp_path / "adapter", threads=1), LocalPolicy(llama_dir, threads=1)
    [[own]] = policy.complete_many([ask("the city", temperature=0.0)])
    [[other]] = plain.complete_many([ask("the city", temperature=0.0)])
    assert own.token_ids is not None
    ids = torch.tensor([[3, *policy.tokenizer.convert_tokens_to_ids(["the", "city"]), 4]])
    with torch.no_grad():
        logprobs = adapted(torch.cat([ids, torch.tensor([own.token_ids])], dim=1)).logits.log_softmax(dim=-1)[0]
    assert own.logprobs == pytest.approx(
        [logprobs[3 + i, token].item() for i, token in enumerate(own.token_ids)], abs=1e-4
    )
    assert own.token_ids != other.token_ids
    assert policy.digest != plain.digest
    policy.close()
    plain.close()
