import asyncio
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, MistralConfig, MistralForCausalLM

from leret.config.policy import LocalPolicySettings
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.base import Request
from leret.policies.local.chat_template import end_token
from leret.policies.local.model import stop_ids
from leret.policies.local.policy import LocalPolicy
from leret.sampling.store.store import Store
from leret.training.algorithms import ALGORITHMS
from leret.training.data import Encoded, TokenEncoder, TrainingExample, check_parity
from leret.training.model import find_initial, load_for_training
from leret.training.stored.preference import collate_pairs, preference_rows
from leret.training.stored.trainer import check_logps
from tests.tiny import tiny_policy
from tests.training.training_runs import trainer_of

PAIRS = [
    Encoded([3, 40, 41, 4], ([50, 51, 5], [60, 5]), (1.0, 0.5)),
    Encoded([3, 43, 4], ([54, 5], [61, 5]), (-1.0, -2.0)),
]
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def checked(model, base, directory, algorithm):
    recipe = ALGORITHMS[algorithm].settings(per_device_train_batch_size=2)
    return check_logps(trainer_of(recipe, model, base, directory, PAIRS), recipe.dtype)


def test_one_matrix_heads_pass(tmp_path, base, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / "opt", "opt"))
    assert checked(model, base, tmp_path / "sft", "sft") is None
    assert checked(model, base, tmp_path / "dpo", "dpo") < 1e-5
    config = MistralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2, sliding_window=None)
    assert checked(MistralForCausalLM(config), base, tmp_path / "kto", "kto") < 1e-5, "of a kind with padded batches"
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    assert check_logps(None, "float32") is None, "no weight is whole"


@pytest.mark.parametrize("algorithm", ["ipo", "kto"])
def test_a_head_of_more_than_one_matrix_is_refused(tmp_path, base, algorithm):
    torch.manual_seed(0)
    bert = BertLMHeadModel(BertConfig(**SMALL, num_attention_heads=2, is_decoder=True))
    with pytest.raises(TrainingError, match=r"TRL computes a log-probability of .* BertLMHeadModel, but the model's"):
        checked(bert, base, tmp_path, algorithm)


@pytest.fixture
def run(original, tmp_path):
    return Run.open(shutil.copytree(original.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def encoder(original):
    model, tokenizer = load_for_training(find_initial(original, "base"), None, "float32")
    return TokenEncoder(tokenizer, end_token(tokenizer, stop_ids(model.generation_config)))


def check(run, encoder):
    check_parity(run, find_initial(run, "base"), encoder)


def test_the_trainer_gets_the_tokens_that_the_engine_sampled(original, encoder):
    with Store(original.store, read_only=True) as store:
        requests = [Request(group.state.messages, tuple(range(4)), 1.0, 12) for group in store.groups()]
    n = 0
    with closing(LocalPolicy(LocalPolicySettings())) as policy:
        for request in requests:
            pair = asyncio.run(policy.complete(request))[:2]
            encoded = encoder.encode([TrainingExample("q", request.messages, tuple(one.text for one in pair))])
            row = {name: values[0] for name, values in preference_rows(encoded).items()}
            batch = collate_pairs([row], encoder.tokenizer.pad_token_id, sequence=False)
            prompt = list(policy.model.encode(request.messages).token_ids)
            assert len(prompt) == pair[0].n_prompt_tokens
            for place, completion in enumerate(pair):
                if completion.finish_reason == "stop":  # to one cut off training adds the end
                    ids, sampled = batch["input_ids"][place], list(completion.token_ids)
                    assert ids[batch["attention_mask"][place].bool()].tolist() == prompt + sampled
                    assert ids[batch["completion_mask"][place].bool()].tolist() == sampled
                    n += 1
    assert n >= 10


def test_a_prompt_that_the_sampler_counted_otherwise_is_refused(run, encoder):
    check(run, encoder)
    with sqlite3.connect(run.store) as database:
        database.execute("UPDATE samples SET n_prompt_tokens = n_prompt_tokens + 1")
    with pytest.raises(TrainingError, match=r"the sampler counted \d+ tokens in the zero-shot prompt, but .* to \d+"):
        check(run, encoder)
