import asyncio
import random

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.core.errors import PolicyError, TrainingError
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from tests.http.servers import serving
from tests.policies.servers import ChatServer, refusal
from tests.sampling.fakes import events_of
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
    with pytest.raises(PolicyError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        trained(run, base, Vllm(updates=False))
    with pytest.raises(TrainingError, match=r"counts 7 prompt tokens where leret counts \d+"):
        trained(run, base, Vllm(counted=7), changed(RECIPE, name="other"))
    with pytest.raises(TrainingError, match=r"policy\.extra_body has response_format"):
        trained(run, base, Vllm(), changed(RECIPE, name="masked"), extra_body={"response_format": {"type": "text"}})


@pytest.fixture(scope="module")
def ids_of(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


class Scoring(Vllm):
    """Sends the log-probabilities of the base model, those of each ``every``-th token .5 too low (0: of none)."""

    def __init__(self, base, every):
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.model = AutoModelForCausalLM.from_pretrained(base)
        self.every, self.n = every, 0

    async def route(self, request, body):
        self.messages = (body or {}).get("messages")
        return await super().route(request, body)

    def tokens(self, text):
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], END]
        prompt = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        values = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        for i in range(len(values)):
            self.n += 1
            if self.every and self.n % self.every == 0:
                values[i] -= 0.5
        return ids, values


@pytest.mark.parametrize("every", [0, 100])
def test_a_server_that_is_wrong_about_one_token_in_a_hundred_is_told_in_the_first_round(run, base, every):
    server = Scoring(base, every)
    recipe = changed(RECIPE, max_steps=1, questions_per_round=8, num_generations=8)
    [entry] = log(trained(run, base, server, recipe, temperature=1.0))
    told = [event for event in events_of(run) if event.get("event") == "alarm" and event["alarm"] == "sampler"]
    assert server.n >= 100
    if every == 0:
        assert (entry["sampling/sampling_logp_difference/max"] < 1e-4, told) == (True, [])
    else:
        assert entry["sampling/sampling_logp_difference/mean"] < 0.02
        assert entry["sampling/sampling_logp_difference/max"] == pytest.approx(0.5, abs=1e-4)
        [alarm] = told
        assert (alarm["step"], "nats at 1." in alarm["message"] or "nats at 0." in alarm["message"]) == (1, True)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (lambda ids: ([7, 8], [-1, -1]), "token ids of '.*' for the completion"),
        (lambda ids: ([*ids, 7], [-1, -1]), "3 token ids and 2 log-probabilities"),
        (lambda ids: ([10_000_000], [-1]), r"token ids from 10000000 to 10000000, but the vocabulary has \d+"),
        (lambda ids: ([-3, 5], [-1, -1]), "token ids from -3 to 5"),
    ],
)
def test_token_ids_of_a_server_that_are_not_the_text_are_refused(run, base, ids_of, tokens, says):
    server = Vllm(tokens=lambda text: tokens(ids_of(text)))
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


@pytest.mark.parametrize(("key", "named"), [("n", True), ("return_token_ids", False)])
def test_a_key_that_the_server_refuses_is_left_out(run, base, ids_of, key, named, caplog):
    class Picky(Vllm):
        async def route(self, request, body):
            if "messages" in (body or {}) and key in body:
                return refusal(f"Unsupported parameter: '{key}'" if named else "bad request")
            self.sends_ids = "return_token_ids" in (body or {})
            return await super().route(request, body)

    def tokens(text):
        return ([*ids_of(text), END], [-0.5, -0.25, -0.1]) if server.sends_ids else (None, [-0.5, -0.25, -0.1])

    server = Picky(tokens=tokens)
    report = trained(run, base, server, changed(RECIPE, max_steps=2))
    assert [entry["num_samples"] for entry in log(report)] == [16, 16]
    notes = [record.getMessage() for record in caplog.records if "refuses the request key" in record.getMessage()]
    assert [f"refuses the request key {key}: " in note for note in notes] == [True]


def test_a_completion_longer_than_the_model_is_refused(run, base):
    class Endless(Vllm):
        async def route(self, request, body):
            if "messages" in (body or {}) and {"max_tokens", "max_completion_tokens"} & {*body}:
                return refusal(
                    "Unsupported parameter: " + ("max_tokens" if "max_tokens" in body else "max_completion_tokens")
                )
            return await super().route(request, body)

    server = Endless(tokens=lambda text: ([7] * 10_000, [-1.0] * 10_000))
    with pytest.raises(TrainingError, match=r"completion of 10000 tokens, but the model has room for \d+"):
        trained(run, base, server)


def test_a_policy_of_this_process_has_no_servers(run):
    with pytest.raises(TrainingError, match="needs a run with policy kind openai, not local"):
        train(RECIPE, run)
