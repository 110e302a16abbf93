"""The policy that ships with leret."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.demo.pretrain.words import build_model, build_tokenizer, vocabulary

POLICY = Path(str(files("leret.demo"))) / "policy"


def test_the_weights_fit_the_wheel_and_are_untied_float32() -> None:
    assert (POLICY / "model.safetensors").stat().st_size <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    assert model.dtype == torch.float32
    assert not model.config.tie_word_embeddings
    assert model.config.head_dim >= 32
    assert model.config.max_position_embeddings >= 1024


def test_the_shipped_files_are_those_that_pretraining_builds() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert tokenizer.get_vocab() == {word: i for i, word in enumerate(vocabulary())}
    assert tokenizer.chat_template == build_tokenizer().chat_template
    shipped = AutoModelForCausalLM.from_pretrained(POLICY).state_dict()
    fresh = build_model(len(tokenizer), 0).state_dict()
    assert {name: value.shape for name, value in shipped.items()} == {n: v.shape for n, v in fresh.items()}


def test_the_log_says_that_the_policy_copies_and_is_diverse() -> None:
    lines = [json.loads(line) for line in (POLICY / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "bridge" in line][-1]
    assert last["step"] == max(line["step"] for line in lines)
    assert last["distinct"] > 0.7
    assert last["copied"] > 0.8
    assert last["bridge"] > 0.0


def test_greedy_completions_end_and_hold_no_unknown_word() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(POLICY), AutoModelForCausalLM.from_pretrained(POLICY)
    text = "<|user|>question: In which city was the director of the film The Golden Harbor born?<|end|><|assistant|>"
    prompt = torch.tensor([tokenizer(text)["input_ids"]])
    written = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert written[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in written
    assert len(written) > 1
