from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.policies.local.decoder import Decoder, Job
from leret.policies.local.kv_cache import PrefixCache

END, SUPPRESSED = 5, (0, 1, 2, 3, 4)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def decoder(model: Any, **kwargs: Any) -> Decoder:
    return Decoder(model, end_ids=[END], suppressed=SUPPRESSED, **kwargs)


def prompts() -> list[tuple[int, ...]]:
    """Six prompts of 3 to 60 tokens; the last three begin with the same 30."""
    generator = torch.Generator().manual_seed(3)
    drawn = [tuple(torch.randint(6, 200, (n,), generator=generator).tolist()) for n in (3, 17, 60, 30, 4, 9, 25)]
    return [*drawn[:3], *(drawn[3] + own for own in drawn[4:])]


def jobs(seeds: tuple[int, ...], temperature: float, top_p: float = 1.0, n_shared: int = 30) -> list[Job]:
    return [
        Job(prompt, n_shared if index >= 3 else 0, seeds, temperature, top_p, 10)
        for index, prompt in enumerate(prompts())
    ]


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_greedy_equals_transformers_and_logprobs_equal_a_plain_forward_pass(
    arch: str, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(f"{arch}_dir"))
    engine = decoder(model, prefixes=PrefixCache(2**24), prefill_tokens=70)
    for _ in range(2):  # the second time the prefix is known
        for job, [own] in zip(jobs((1,), 0.0), engine.run(jobs((1,), 0.0)), strict=True):
            ids = torch.tensor([job.token_ids])
            n_prompt = ids.shape[1]
            with torch.no_grad():
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
                logprobs = model(expected).logits.log_softmax(dim=-1)[0]
            assert own.token_ids == tuple(expected[0, n_prompt:].tolist())
            plain = [logprobs[n_prompt - 1 + i, token].item() for i, token in enumerate(own.token_ids)]
            assert own.logprobs == pytest.approx(plain, abs=1e-5)
    assert engine.prefixes is not None
    assert engine.prefixes.hits > 0


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_sample_depends_on_its_own_seed_and_not_on_the_batch(llama_dir: Path, top_p: float) -> None:
    model = load(llama_dir)
    seeds = tuple(range(50, 56))
    together = decoder(model, prefixes=PrefixCache(2**24)).run(jobs(seeds, 1.0, top_p))
    alone = decoder(model)
    n_different = set()
    for job, completions in zip(jobs(seeds, 1.0, top_p), together, strict=True):
        for seed, completion in zip(seeds, completions, strict=True):
            [[single]] = alone.run([Job(job.token_ids, 0, (seed,), 1.0, top_p, 10)])
            assert single.token_ids == completion.token_ids
            assert single.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
            n_different.add(completion.token_ids)
    assert len(n_different) == 36


def test_rows_that_end_leave_the_others_as_they_are(llama_dir: Path) -> None:
    model = load(llama_dir)
    limits = (1, 2, 3, 10, 4, 1)
    several = [Job(job.token_ids, 0, (9,), 1.0, 1.0, limit) for job, limit in zip(jobs((9,), 1.0), limits, strict=True)]
    for job, limit, [own] in zip(jobs((9,), 1.0), limits, decoder(model).run(several), strict=True):
        [[longest]] = decoder(model).run([job])
        assert own.token_ids == longest.token_ids[:limit]
        assert own.finish_reason == ("stop" if own.token_ids[-1] == END else "length")


def test_the_end_token_is_kept_and_ends_the_completion(llama_dir: Path) -> None:
    results = decoder(load(llama_dir)).run([Job((3, 9, 4), 0, tuple(range(64)), 3.0, 1.0, 30)])[0]
    ended = [own for own in results if own.finish_reason == "stop"]
    assert ended
    assert all(own.token_ids.index(END) == len(own.token_ids) - 1 for own in ended)
    assert all(
        END not in own.token_ids and len(own.token_ids) == 30 for own in results if own.finish_reason == "length"
    )
    assert not {token for own in results for token in own.token_ids} & set(SUPPRESSED)
    [greedy] = decoder(load(llama_dir)).run([Job((3, 9, 4), 0, (1, 2, 3), 0.0, 1.0, 4)])
    assert (len(greedy), len(set(greedy))) == (3, 1)
