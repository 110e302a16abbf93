import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.local.decoder import Generated
from leret.policies.local.model import ARCHITECTURES
from leret.policies.local.policy import LocalPolicy
from leret.policies.local.sampling import choose, step_keys
from leret.training.algorithms.base import completion_logps
from tests.policies.conftest import ask

START = 0


class Seq2Seq:
    """An encoder reads the prompt, a decoder writes the completion; without a cache, for the test alone."""

    auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, network, tokenizer, name, enable_thinking=None):
        self.network, self.tokenizer = network, tokenizer
        self._encoder = PromptEncoder(tokenizer, None, name, enable_thinking)
        self._ends = self._encoder.set_ends(tokenizer.eos_token_id)

    def encode(self, messages):
        return self._encoder.encode(messages)

    def generate(self, jobs):
        return [
            [self._encoder.completion(len(job.token_ids), self._write(job, seed), job.stop) for seed in job.seeds]
            for job in jobs
        ]

    def renew(self):
        """Nothing is cached."""

    @staticmethod
    def logps(network, prompt, completion):
        logits = Seq2Seq.logits(network, prompt, completion[:-1])
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]

    @staticmethod
    def logits(network, prompt, written):
        output = network(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[START, *written]]))
        return output.logits[0].float()

    @torch.inference_mode()
    def _write(self, job, seed):
        ids = []
        logprobs = []
        temperature, top_p = torch.tensor([job.temperature]), torch.tensor([job.top_p])
        for key in step_keys([seed], job.max_tokens)[0]:
            logits = self.logits(self.network, job.token_ids, ids)[-1:]
            token, logprob = choose(logits, key[None], temperature, top_p)
            ids.append(int(token))
            logprobs.append(float(logprob))
            if ids[-1] in self._ends:
                break
        return Generated(tuple(ids), tuple(logprobs), "stop" if ids[-1] in self._ends else "length")


@pytest.fixture
def t5(llama_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    config = T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=len(tokenizer), decoder_start_token_id=START
    )
    for part in (T5ForConditionalGeneration(config), tokenizer):
        part.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def test_another_architecture_is_a_class_and_a_line(t5, monkeypatch):
    settings = LocalPolicySettings(model=str(t5))
    with pytest.raises(PolicyError, match=r"t5 \(t5\) has an encoder.*kind: openai"):
        LocalPolicy(settings)
    monkeypatch.setitem(ARCHITECTURES, "encoder-decoder", Seq2Seq)
    policy = LocalPolicy(settings)
    several, [greedy] = policy.complete_many([ask("the city", 1, 2), ask("the city", temperature=0.0)])
    assert several[0].token_ids != several[1].token_ids
    network = policy.model.network
    live = LocalPolicy.over(network.train(), policy.model.tokenizer, name="live", digest="one")
    assert live.complete_many([ask("the city", 1, 2)]) == [several]
    assert network.training
    check_logps(policy, greedy)
    for one in (policy, live):
        one.close()


def test_a_causal_models_logps_equal_those_of_sampling(policy):
    check_logps(policy, *policy.complete_many([ask("the city", 1, 2, 3)])[0])


def check_logps(policy, *completions):
    prompt = policy.prompt_ids(ask("the city").messages)
    for one in completions:
        logps = completion_logps(policy.model.network.eval(), prompt, one.token_ids or ())
        assert one.logprobs == pytest.approx(logps.tolist(), abs=1e-5)
