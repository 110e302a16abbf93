import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import Completion
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.local.model import ARCHITECTURES
from leret.policies.local.policy import LocalPolicy
from leret.training.stored.trainer import completion_logps
from tests.policies.conftest import ask


class Seq2Seq:
    auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, network, tokenizer, name, enable_thinking=None):
        self.network, self.tokenizer = network, tokenizer
        self.encode = PromptEncoder(tokenizer, None, name, enable_thinking).encode

    def generate(self, jobs):
        return [[Completion("a", "stop", 0, 1, (seed,), (-0.5,)) for seed in job.seeds] for job in jobs]

    def renew(self):
        """Nothing is cached."""

    @staticmethod
    def logps(network, prompt, completion):
        return torch.full((len(completion),), -0.5)


def test_another_architecture_is_a_class_and_a_line(llama_dir, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(tokenizer)}
    for part in (T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), tokenizer):
        part.save_pretrained(tmp_path / "t5")
    settings = LocalPolicySettings(model=str(tmp_path / "t5"))
    with pytest.raises(PolicyError, match=r"t5 \(t5\) has an encoder.*kind: openai"):
        LocalPolicy(settings)
    monkeypatch.setitem(ARCHITECTURES, "encoder-decoder", Seq2Seq)
    policy = LocalPolicy(settings)
    [several] = policy.complete_many([ask("the city", 1, 2)])
    assert [one.token_ids for one in several] == [(1,), (2,)]
    prompt = policy.prompt_ids(ask("the city").messages)
    assert completion_logps(policy.model.network.eval(), prompt, several[0].token_ids).tolist() == [-0.5]
    policy.close()
