import json
import sqlite3
from datetime import datetime
from importlib.resources import files

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError, TrainingError
from leret.policies.base import Request
from leret.policies.load import make_policy, policy_state
from leret.policies.local.chat_template import PromptEncoder, apply_template, dated, end_token
from leret.policies.local.policy import LocalPolicy
from leret.training.data import TokenEncoder
from leret.training.stage import train
from leret.training.stored.sft import SFTRecipe, sft_rows
from tests.tiny import TEMPLATE, tiny_policy
from tests.training.training_runs import sampled_run

ENDS = {"qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
SPECIALS = ["<bos>", "<|im_start|>", "<start_of_turn>", *sorted(set(ENDS.values()))]
MESSAGES = ({"role": "system", "content": "write a query"}, {"role": "user", "content": "who wrote the book ?"})
FEW_SHOT = (*MESSAGES, {"role": "assistant", "content": "book author"}, {"role": "user", "content": "the city"})
WRITTEN = ("book author", "<think>\n the book\n</think>\n\nbook author", "<think>\n the book", " book author ")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    def make(template):
        path = tiny_policy(tmp_path_factory.mktemp("models") / template)
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
        tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": ENDS[template]})
        tokenizer.add_tokens(SPECIALS, special_tokens=True)
        tokenizer.add_tokens(["<think>", "</think>"])  # text, as in Qwen3's tokenizer
        tokenizer.chat_template = (files("trl") / f"chat_templates/{template}.jinja").read_text()
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        for part in (tokenizer, model):
            part.save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("template", ENDS)
def test_sampled_and_trained_tokens_are_equal(model_of, template):
    tokenizer = AutoTokenizer.from_pretrained(model_of(template))
    end = end_token(tokenizer, [tokenizer.eos_token_id])
    encoder, sampler = TokenEncoder(tokenizer, end), PromptEncoder(tokenizer, None, template)
    begun = (*MESSAGES, {"role": "assistant", "content": "query:"})
    for messages in (MESSAGES, FEW_SHOT, begun):
        assert encoder.prompt_ids(messages) == list(sampler.encode(messages).token_ids)
    assert encoder.render(begun).endswith("query:"), "a prompt that ends with an answer is continued"
    assert sampler.encode(begun).n_shared == sampler.encode(MESSAGES).n_shared
    for text in WRITTEN:
        ids = encoder._completion(MESSAGES, encoder.prompt_ids(MESSAGES), text)
        assert (ids[-1], ids.count(end), tokenizer.decode([end])) == (end, 1, ENDS[template])


def test_enable_thinking_reaches_sampler_trainer_and_evaluation(model_of, tmp_path):
    base = model_of("qwen3")
    settings = LocalPolicySettings(model=str(base), enable_thinking=False)
    policy = make_policy(settings)
    policy.close()
    assert "<think>" in policy.model.tokenizer.decode(policy.model.encode(MESSAGES).token_ids)
    assert policy_state(policy)["enable_thinking"] is False
    assert settings.in_process("other").enable_thinking is False  # a trained policy of the run, and leret.load
    run = sampled_run(tmp_path / "run", base)
    section = run.manifest.sampling
    run.update(sampling={**section, "policy": {**section["policy"], "enable_thinking": False}})
    with sqlite3.connect(run.store) as store:  # the sampler's own counts, which the trainer's must equal
        for state, messages in store.execute("SELECT id, messages FROM states").fetchall():
            n = len(policy.model.encode(tuple(json.loads(messages))).token_ids)
            store.execute("UPDATE samples SET n_prompt_tokens = ? WHERE state_id = ?", (n, state))
    assert train(SFTRecipe(per_device_train_batch_size=8), run).examples == 24
    run.update(sampling=section)
    with pytest.raises(TrainingError, match="the sampler counted"):
        train(SFTRecipe(name="other", per_device_train_batch_size=8), run)


def test_system_text_joins_the_users_turn_if_refused(model_of):
    base, how = model_of("gemma"), {"tokenize": False, "add_generation_prompt": True}
    policy = LocalPolicy(LocalPolicySettings(model=str(base)))
    text = apply_template(policy.model.tokenizer, MESSAGES, "gemma", **how)
    assert text == (
        "<bos><start_of_turn>user\nwrite a query\n\nwho wrote the book ?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert apply_template(policy.model.tokenizer, FEW_SHOT, "gemma", **how).count("write a query") == 1
    with pytest.raises(PolicyError, match=r"gemma's chat template rejects the roles system, assistant \(System role"):
        apply_template(policy.model.tokenizer, (MESSAGES[0], FEW_SHOT[2]), "gemma", **how)
    [[completion]] = policy.complete_many([Request(FEW_SHOT, (1,), 1.0, 4)])
    policy.close()
    assert completion.n_prompt_tokens > 10
    assert policy.model.encode(FEW_SHOT).n_shared > 5  # a demo's turns are still shared


class Clock(datetime):
    today = (2026, 11, 30)

    @classmethod
    def now(cls, tz=None):
        return cls(*cls.today)


def test_a_template_prints_one_date_in_all_stages_of_a_run(tmp_path, monkeypatch):
    base = tiny_policy(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "\n{% set form = '%Y %d' %}{{ '2' if strftime_now(form) == '2026 30' else '1' }}" + TEMPLATE
    )
    tokenizer.save_pretrained(base)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    encoder = PromptEncoder(tokenizer, None, "dated")
    november = encoder.encode(MESSAGES).token_ids
    monkeypatch.setattr(Clock, "today", (2026, 12, 1))
    assert encoder.encode(MESSAGES).token_ids != november  # the clock
    with dated("2026-11-30"):
        assert encoder.encode(MESSAGES).token_ids == november
        assert TokenEncoder(tokenizer, tokenizer.eos_token_id).prompt_ids(MESSAGES) == list(november)
    run = sampled_run(tmp_path / "run", base)
    assert run.manifest.date == datetime.now().date().isoformat()
    run.update(date="2026-11-30")
    prompts = []
    monkeypatch.setattr("leret.training.stored.sft.sft_rows", lambda rows: prompts.extend(rows) or sft_rows(rows))
    train(SFTRecipe(per_device_train_batch_size=8, max_steps=1), run)
    assert {tuple(row.prompt[:2]) for row in prompts} == {november[:2]}
