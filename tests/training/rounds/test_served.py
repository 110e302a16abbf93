import asyncio
import random

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from leret.core.errors import PolicyError, TrainingError
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from tests.http.servers import serving
from tests.policies.servers import ChatServer, refusal
from tests.tiny import SPECIALS
from tests.training.training_runs import LETTERS, changed, log

END = SPECIALS.index("<|end|>")
RECIPE = GRPORecipe(
    served=True, lora={"r": 2, "alpha": 4}, num_generations=4, questions_per_round=2, max_steps=3, learning_rate=1e-2,
    logging_steps=1, save_steps=1, max_completion_length=6, device="cpu", beta=0.1,
)  # fmt: skip


class Vllm(ChatServer):
    """Loads adapters, and writes two words by the seed; ``counted`` tokens a prompt, 0 says nothing of them."""

    models = ("base",)
    counted, updates = 0, True
    tokens = None  # of a completion's text: its token ids and their log-probabilities

    async def route(self, request, body):
        if request.path == "/v1/load_lora_adapter" and self.updates:
            self.models = (*self.models, body["lora_name"])
            return web.Response(text="Success")
        if request.path != "/v1/chat/completions":
            return await super().route(request, body)
        rng = random.Random(body.get("seed"))
        texts = [" ".join(rng.sample(LETTERS, 2)) for _ in range(body.get("n", 1))]
        choices = [{"index": i, "message": {"content": text}, "finish_reason": "stop"} for i, text in enumerate(texts)]
        for choice in choices if self.tokens else ():
            ids, values = self.tokens(choice["message"]["content"])
            choice |= {"token_ids": ids, "logprobs": {"content": [{"logprob": value} for value in values]}}
        return web.json_response({"choices": choices, "usage": {"prompt_tokens": self.counted}})


def trained(run, base, server, recipe=RECIPE, **keys):
    async def main():
        async with serving(server, under="/v1") as urls:
            policy = {"kind": "openai", "model": "base", "urls": urls, "max_tokens": 6, "retry_for_s": 0, **keys}
            run.update(sampling={**run.sampling(), "policy": policy})
            return await asyncio.to_thread(train, changed(recipe, init_from=str(base)), run)

    return asyncio.run(main())


def test_servers_write_each_round_with_the_adapter_as_it_is(run, base, learnt):
    server = Vllm()
    report = trained(run, base, server)
    loaded = [body["lora_name"] for body in server.bodies if "lora_name" in body]
    assert len({*loaded}) == 3  # the weights of three rounds
    asked = [body["model"] for body in server.bodies if "messages" in body]
    assert [*dict.fromkeys(asked)] == loaded
    assert {len(ids) for _, ids in learnt} == {3}  # two words, and what ends a turn
    assert {ids[-1] for _, ids in learnt} == {END}
    assert [entry["num_samples"] for entry in log(report)] == [16, 16, 16]
    assert (report.path / "adapter_model.safetensors").is_file()


def test_what_the_servers_cannot_do_is_said(run, base):
    with pytest.raises(TrainingError, match="needs a run with policy kind openai, not local"):
        train(RECIPE, run)
    with pytest.raises(PolicyError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        trained(run, base, Vllm(updates=False))
    with pytest.raises(TrainingError, match=r"counts 7 prompt tokens where leret counts \d+"):
        trained(run, base, Vllm(counted=7), changed(RECIPE, name="other"))
    with pytest.raises(TrainingError, match=r"policy\.extra_body has response_format"):
        trained(run, base, Vllm(), changed(RECIPE, name="masked"), extra_body={"response_format": {"type": "text"}})


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (lambda ids: ([7, 8], [-1, -1]), "token ids of '.*' for the completion"),
        (lambda ids: ([*ids, 7], [-1, -1]), "3 token ids and 2 log-probabilities"),
        (lambda ids: ([10_000_000], [-1]), r"token ids from 10000000 to 10000000, but the vocabulary has \d+"),
    ],
)
def test_token_ids_of_a_server_that_are_not_the_text_are_refused(run, base, tokens, says):
    tokenizer = AutoTokenizer.from_pretrained(base)
    server = Vllm(tokens=lambda text: tokens(tokenizer(text, add_special_tokens=False)["input_ids"]))
    with pytest.raises(TrainingError, match=rf"http://127\.0\.0\.1:\d+/v1 sent {says}.*Its tokenizer"):
        trained(run, base, server)
    assert not (run.policies / "grpo").exists()


def test_a_training_whose_every_sample_failed_is_refused(run, base):
    server = Vllm(tokens=lambda text: ([7], [float("nan")]))  # 3 rounds of 8: too few for the share of failures
    recipe = changed(RECIPE, questions_per_round=1)
    for _ in range(2):  # resumed too
        with pytest.raises(PolicyError, match=r"failures in .* samples, and no rewards; .*log-probability"):
            trained(run, base, server, recipe)
    assert not (run.policies / "grpo").exists()


def test_a_completion_longer_than_the_model_is_refused(run, base):
    class Endless(Vllm):
        async def route(self, request, body):
            for key in {"max_tokens", "max_completion_tokens"} & {*(body or {})}:
                return refusal(f"Unsupported parameter: {key}")
            return await super().route(request, body)

    server = Endless(tokens=lambda text: ([7] * 10_000, [-1.0] * 10_000))
    with pytest.raises(TrainingError, match=r"completion of 10000 tokens, but the model has room for \d+"):
        trained(run, base, server)
