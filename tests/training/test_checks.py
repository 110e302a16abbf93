import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from types import SimpleNamespace

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
from leret.rollouts.environment import Environment
from leret.sampling.store.store import Store
from leret.training.algorithms import ALGORITHMS
from leret.training.data import Encoded, RunSamples, TokenEncoder, TrainingExample, check_parity
from leret.training.model import find_initial, load_for_training
from leret.training.stored.preference import IPORecipe, collate_pairs, examples, preference_rows
from leret.training.stored.trainer import check_loss
from tests.sampling.fakes import events_of
from tests.tiny import tiny_policy
from tests.training.training_runs import trainer_of

PAIRS = [
    Encoded([3, 40, 41, 4], ([50, 51, 5], [60, 5]), (1.0, 0.5)),
    Encoded([3, 43, 4], ([54, 5], [61, 62, 63, 5]), (-0.5, -1.0)),  # of one completion: an undesirable one
]
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def checked(model, base, directory, algorithm, **keys):
    recipe = ALGORITHMS[algorithm].settings(per_device_train_batch_size=2, **keys)
    trainer = trainer_of(recipe, model, base, directory, PAIRS)
    return trainer, check_loss(trainer, partial(ALGORITHMS[algorithm].oracle_loss, recipe), recipe.dtype)


def test_where_no_weight_is_whole_no_loss_is_compared(monkeypatch):
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    trainer = SimpleNamespace(model=None, train_dataset=None)
    assert check_loss(trainer, lambda model, rows: 0.0, "float32") is None


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", {"algorithm": "sft"}),
        ("opt", {"algorithm": "dpo"}),
        ("mistral", {"algorithm": "ipo"}),  # of a kind whose batches are padded
        ("llama", {"algorithm": "ipo", "reduction": "token", "losses": {"sft": 0.3}}),
        ("llama", {"algorithm": "ipo", "losses": {"dpo": 0.5, "ipo": 0.1}, "reward_margin": 2.0}),
        ("llama", {"algorithm": "kto", "undesirable_weight": 0.5}),
    ],
)
def test_one_matrix_heads_pass_and_keep_their_weights(tmp_path, base, arch, keys):
    if arch == "mistral":
        config = MistralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2, sliding_window=None)
        model = MistralForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / arch, arch))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, error = checked(model, base, tmp_path / "out", **keys)
    assert error < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.model.training


@pytest.mark.parametrize("algorithm", ["sft", "ipo", "kto"])
def test_a_head_of_more_than_one_matrix_is_refused(tmp_path, base, algorithm):
    torch.manual_seed(0)
    bert = BertLMHeadModel(BertConfig(**SMALL, num_attention_heads=2, is_decoder=True))
    with pytest.raises(TrainingError, match=r"TRL computes a loss of .* for BertLMHeadModel, but the model's forward"):
        checked(bert, base, tmp_path, algorithm)


def change_program(run, **keys):
    section = run.manifest.sampling
    section["program"] |= keys
    run.update(sampling=section)


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original.path.parent, tmp_path / "copy")
    copy = Run(tmp_path / "copy/run")
    change_program(copy, path=f"{tmp_path}/copy/multihop.py:MultiHop")
    return copy


@pytest.fixture(scope="module")
def encoder(original):
    model, tokenizer = load_for_training(find_initial(original, "base"), None, "float32")
    return TokenEncoder(tokenizer, end_token(tokenizer, stop_ids(model)))


def check(run, encoder, said=""):
    pairs = examples(IPORecipe(), RunSamples(run))
    for pair in pairs:
        pair.prompt[-1]["content"] += said
    initial = find_initial(run, "base")
    check_parity(run, initial, pairs, encoder)


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


def rewrite_program(run, old, new):
    path = run.path.parent / "multihop.py"
    path.write_text(path.read_text().replace(old, new))


def count_other_tokens(run):
    with sqlite3.connect(run.store) as database:
        database.execute("UPDATE samples SET n_prompt_tokens = n_prompt_tokens + 1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: rewrite_program(run, "context", "passages"),
         r"the program no longer sends the sampled messages:\n(.|\n)*sampled: (.|\n)*today: "),
        (lambda run: rewrite_program(run, "write_query", "ask"), "no longer has the sampled predictor 'write_query'"),
        (lambda run: change_program(run, adapter={"kind": "compact", "words_per_item": 2}),
         "step 1: the program no longer sends the sampled messages"),
        (count_other_tokens, r"the sampler counted \d+ tokens in the zero-shot prompt, but .* to \d+"),
    ],
)  # fmt: skip
def test_what_has_changed_since_sampling_is_refused(run, encoder, change, says):
    change(run)
    with pytest.raises(TrainingError, match=says):
        check(run, encoder)


def test_what_was_not_sent_is_refused(original, encoder):
    with pytest.raises(TrainingError, match=r"differs from the sampled prompt(.|\n)*please(.|\n)*leret rescore"):
        check(original, encoder, said=" please")


def test_a_program_is_opened_again_only_where_it_or_a_version_has_changed(run, encoder, monkeypatch):
    monkeypatch.setattr(Environment, "formatter", property(lambda self: pytest.fail("opened")))
    check(run, encoder)
    run.update(versions={**run.manifest.versions, "dspy": "0"})
    with pytest.raises(pytest.fail.Exception, match="opened"):
        check(run, encoder)


def test_a_run_as_it_was_sampled_passes_and_a_lost_program_is_noted(run, encoder):
    check(run, encoder)
    (run.path.parent / "multihop.py").unlink()
    check(run, encoder)
    (note,) = (json.dumps(event) for event in events_of(run) if event["event"] == "messages not checked")
    assert "multihop.py" in note
