import asyncio

import pytest
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import PromptTooLongError, Request
from leret.policies.local.decoder import Decoder
from leret.policies.local.model import load_model
from leret.policies.local.policy import LocalPolicy
from tests.policies.conftest import ask


def together(policy, *requests):
    async def ask_all():
        return await asyncio.gather(*map(policy.complete, requests), return_exceptions=True)

    return asyncio.run(ask_all())


def test_a_completion_ends_before_its_stop_string(policy):
    [[free]] = policy.complete_many([ask("the city", 5, max_tokens=5)])
    assert len(free.token_ids) == len(free.logprobs) == free.n_completion_tokens == 5
    assert (free.n_prompt_tokens, free.finish_reason) == (4, "length")  # <|user|> the city <|assistant|>
    assert free.text == policy.model.tokenizer.decode(list(free.token_ids))
    stop = " ".join(["", *free.text.split()[2:4]])  # of two tokens
    requests = [ask("the city", 5, max_tokens=5, stop=stops) for stops in (("no such text", stop), ())]
    [[stopped], [other]] = policy.complete_many(requests)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.n_completion_tokens) == ("stop", 4)
    assert other.token_ids == free.token_ids


def test_a_prompt_beyond_the_positions_fails_alone(policy):
    long, short, [tight] = together(policy, ask("book " * 600), ask("the city"), ask("book " * 507, max_tokens=64))
    with pytest.raises(PromptTooLongError, match=r"602 tokens.*512 tokens"):
        raise long
    assert len(short) == 1
    assert tight.n_prompt_tokens + tight.n_completion_tokens <= 512


def test_a_sliding_window_shares_no_prefixes(llama_dir):
    config = MistralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=2, vocab_size=300, sliding_window=8)  # fmt: skip
    model, tokenizer = MistralForCausalLM(config), AutoTokenizer.from_pretrained(llama_dir)
    policy = LocalPolicy.over(model, tokenizer, name="mistral", digest="0")
    assert policy.model.decoder.prefixes is None
    policy.close()


def test_empty_requests_and_closed_policies_are_refused(llama_dir):
    policy = LocalPolicy(LocalPolicySettings(model=str(llama_dir)))
    policy.max_batch_tokens = 64
    with pytest.raises(PolicyError, match="0 seeds"):
        policy.complete_many([Request(({"role": "user", "content": "the city"},), (), 1.0, 8)])
    policy.complete_many([ask("the city", i) for i in range(16)])  # 4 + 8 tokens a row: 5 rows a batch
    assert policy.n_batches >= 4
    asyncio.run(policy.aclose())
    asyncio.run(policy.aclose())
    with pytest.raises(PolicyError, match="closed"):
        policy.complete_many([ask("the city")])


def test_out_of_memory_halves_the_batch(llama_dir, monkeypatch):
    run, sizes = Decoder.run, []

    def hungry(self, jobs):
        if len(jobs) > 2 or any(len(job.seeds) > 4 for job in jobs):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        sizes.append(len(jobs))
        return run(self, jobs)

    monkeypatch.setattr(Decoder, "run", hungry)
    small = LocalPolicy(LocalPolicySettings(model=str(llama_dir)))
    *fits, failed = together(small, *[ask(f"book {i}", i) for i in range(7)], ask("city", *range(6)))
    small.close()
    assert [len(each) for each in fits] == [1] * 7
    assert (sum(sizes), max(sizes)) == (7, 2)
    with pytest.raises(PolicyError, match="6 samples of 8 tokens"):
        raise failed


def test_a_model_in_training_is_sampled_with_its_weights(llama_dir):
    import torch
    from peft import LoraConfig, get_peft_model

    loaded = load_model(llama_dir, LocalPolicySettings(device="cpu", dtype="float32"))
    tokenizer, lora = loaded.tokenizer, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(loaded.network.requires_grad_(True), lora).train()
    policy = LocalPolicy.over(model, tokenizer, name="live", digest="one")
    shared = {"role": "system", "content": "who wrote the book " * 8}
    requests = [Request((shared, ask(f"the city {i}").messages[0]), (1, 2), 1.0, 8) for i in range(4)]
    saved = LocalPolicy(LocalPolicySettings(model=str(llama_dir)))
    here, same = (one.complete_many(requests) for one in (policy, saved))
    assert [[one.text for one in each] for each in here] == [[one.text for one in each] for each in same]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    policy.renew("two")
    fresh = LocalPolicy.over(model, tokenizer, name="live", digest="two")
    after = policy.complete_many(requests)
    assert after == fresh.complete_many(requests) != same
    assert (policy.digest, model.training, any(p.grad is not None for p in model.parameters())) == ("two", True, False)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()  # what the sampler made is in no graph
    for one in (policy, saved, fresh):
        one.close()
