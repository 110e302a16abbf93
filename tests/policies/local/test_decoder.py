import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.policies.local.decoder import Decoder, Job
from leret.policies.local.kv_cache import PrefixCache
from tests.tiny import tiny_policy

END, SUPPRESSED = 5, (0, 1, 2, 3, 4)


def decoder(directory, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return Decoder(model, end_ids=[END], suppressed=SUPPRESSED, **kwargs)


def jobs(*seeds, temperature=1.0, top_p=1.0):
    generator = torch.Generator().manual_seed(3)
    drawn = [tuple(torch.randint(6, 200, (n,), generator=generator).tolist()) for n in (3, 17, 60, 30, 4, 9, 25)]
    prompts = [(ids, 0) for ids in drawn[:3]] + [(drawn[3] + ids, 30) for ids in drawn[4:]]
    return [Job(prompt, n_shared, seeds, temperature, top_p, 10) for prompt, n_shared in prompts]


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_greedy_decoding_equals_transformers(arch, tmp_path):
    engine = decoder(tiny_policy(tmp_path, arch), prefixes=PrefixCache(2**24), prefill_tokens=70)
    first, second = (engine.run(jobs(1, temperature=0.0)) for _ in range(2))
    assert engine.prefixes.hits > 0, "the second time, the prefix is known"
    for job, *several in zip(jobs(1, temperature=0.0), first, second, strict=True):
        ids, n = torch.tensor([job.token_ids]), len(job.token_ids)
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
        with torch.no_grad():
            expected = engine.model.generate(ids, **how)
            logprobs = engine.model(expected).logits.log_softmax(dim=-1)[0, n - 1 : -1]
        plain = logprobs.gather(1, expected[0, n:, None])[:, 0].tolist()
        for [generated] in several:
            assert generated.token_ids == tuple(expected[0, n:].tolist())
            assert generated.logprobs == pytest.approx(plain, abs=1e-5)


def test_a_sample_depends_on_its_seed_not_on_the_batch(llama_dir):
    seeds = (50, 51, 52)
    together = decoder(llama_dir, prefixes=PrefixCache(2**24)).run(jobs(*seeds, top_p=0.8))
    alone = decoder(llama_dir)
    for job, completions in zip(jobs(*seeds, top_p=0.8), together, strict=True):
        for seed, completion in zip(seeds, completions, strict=True):
            [[single]] = alone.run([Job(job.token_ids, 0, (seed,), 1.0, 0.8, 10)])
            assert single.token_ids == completion.token_ids
            assert single.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
    assert len({completion.token_ids for completions in together for completion in completions}) == 18


def test_the_end_token_is_included_and_ends_a_completion(llama_dir):
    [results] = decoder(llama_dir).run([Job((3, 9, 4), 0, tuple(range(64)), 3.0, 1.0, 30)])
    assert {generated.finish_reason for generated in results} == {"stop", "length"}
    for generated in results:
        ends = [i for i, token in enumerate(generated.token_ids) if token == END]
        assert ends == ([] if generated.finish_reason == "length" else [len(generated.token_ids) - 1])
        assert not set(generated.token_ids) & set(SUPPRESSED)
    [greedy] = decoder(llama_dir).run([Job((3, 9, 4), 0, (1, 2, 3), 0.0, 1.0, 4)])
    assert (len(greedy), len(set(greedy))) == (3, 1)
