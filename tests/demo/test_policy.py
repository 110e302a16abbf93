"""The policy that ships with leret."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.demo.pretrain.words import build_model, build_tokenizer, vocabulary

POLICY = Path(str(files("leret.demo"))) / "policy"


def test_the_shipped_files_are_those_that_pretraining_builds() -> None:
    assert (POLICY / "model.safetensors").stat().st_size <= 8_000_000
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert tokenizer.get_vocab() == {word: i for i, word in enumerate(vocabulary())}
    assert tokenizer.chat_template == build_tokenizer().chat_template
    shipped, fresh = AutoModelForCausalLM.from_pretrained(POLICY), build_model(len(tokenizer), 0)
    forms = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (shipped, fresh)]
    assert forms[0] == forms[1]
    assert "lm_head.weight" in forms[0]  # untied: a server can then reload weights in place


def test_greedy_completions_end_and_hold_no_unknown_word() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(POLICY), AutoModelForCausalLM.from_pretrained(POLICY)
    text = "<|user|>question: In which city was the director of the film The Golden Harbor born?<|end|><|assistant|>"
    prompt = torch.tensor([tokenizer(text)["input_ids"]])
    written = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert len(written) > 1
    assert (written[-1], tokenizer.unk_token_id in written) == (tokenizer.eos_token_id, False)
