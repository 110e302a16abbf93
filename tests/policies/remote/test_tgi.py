"""The TGI policy, with the types and the client of the real package. Failures: test_contract."""

from functools import partial

import pytest
from aiohttp import web

from leret.config.policy import TgiPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import Request
from tests.policies import servers
from tests.policies.conftest import ask
from tests.policies.servers import TgiServer, tgi_sequence

text_generation = pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")

from leret.policies.remote.tgi import TgiPolicy  # noqa: E402


@pytest.fixture
def asked(llama_dir):
    return partial(servers.asked, kind="tgi", model=str(llama_dir))


def test_each_sample_is_a_request_with_a_seed(asked):
    server = TgiServer()
    completions = asked(server, 1, 2, 3)
    seeds = {body["parameters"]["seed"] for body in server.bodies}
    assert {completion.text for completion in completions} == {f"text {seed}.0" for seed in seeds}
    assert len(seeds) == 3
    assert (completions[0].token_ids, completions[0].logprobs) == ((11, 12, 2), (-0.5, -1.25, -0.125))
    assert (completions[0].n_prompt_tokens, completions[0].n_completion_tokens, completions[0].finish_reason) == (
        7,
        3,
        "stop",
    )


def test_the_body_equals_that_of_the_real_client(llama_dir):
    from transformers import AutoTokenizer

    server = TgiServer()
    messages = ({"role": "system", "content": "search"}, {"role": "user", "content": "the city ?"})
    how = {"do_sample": True, "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.5, "seed": 4}

    async def work(policy):
        [completions] = await policy.complete(Request(messages, (4,), 0.7, 9, 0.5, ("\n",)))
        client = text_generation.AsyncClient(server.url, timeout=10)
        return completions, await client.generate(server.bodies[0]["inputs"], stop_sequences=["\n"], **how)

    completions, theirs = servers.run(server, work, kind="tgi", model=str(llama_dir))
    assert server.bodies[0] == server.bodies[1]
    assert (
        completions.text == theirs.generated_text.removesuffix("\n") != theirs.generated_text
    )  # TGI leaves the stop string
    assert completions.token_ids == tuple(token.id for token in theirs.details.tokens)
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    wanted = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer(server.bodies[0]["inputs"])["input_ids"] == list(wanted)


@pytest.mark.parametrize(
    ("settings", "n_choices", "parameters"),
    [
        ({"best_of": True}, 3, {"best_of": 3, "seed": None, "do_sample": True}),
        ({"temperature": 0.0}, 1, {"do_sample": False, "temperature": None, "seed": None, "top_p": None}),
    ],
    ids=["best_of, which takes no seed", "greedy"],
)
def test_best_of_and_greedy_samples_are_one_request(asked, settings, n_choices, parameters):
    server = TgiServer()
    completions = asked(server, 1, 2, 3, **settings)
    assert [completion.text for completion in completions] == [f"text None.{i % n_choices}" for i in range(3)]
    [body] = server.bodies
    assert {name: body["parameters"][name] for name in parameters} == parameters


def test_a_gateway_with_only_the_root_is_detected_once(llama_dir):
    server = TgiServer(root_only=True)

    async def work(policy):
        return [await policy.complete(ask("the city", seed)) for seed in (1, 2)]

    assert len(servers.run(server, work, kind="tgi", model=str(llama_dir))) == 2
    assert server.paths == ["/generate", "/", "/"]


def test_prompt_tokens_are_counted_without_a_header(asked):
    assert asked(TgiServer(headers={}))[0].n_prompt_tokens == 4  # <|user|> the city <|assistant|>


def test_a_failed_generation_is_retried(asked):
    failed = web.json_response({"error": "CUDA out of memory", "error_type": "generation"}, status=424)
    assert asked(TgiServer([failed]), retry_for_s=5.0)[0].text == "text 1.0"


def test_the_digest_covers_model_and_template(llama_dir, tmp_path):
    def tgi(model, url="http://a", **settings):
        return TgiPolicy(TgiPolicySettings(model=str(model), urls=(url,), **settings))

    one = tgi(llama_dir)
    assert (one.name, one.digest) == (llama_dir.name, tgi(llama_dir, "http://b/generate").digest)
    named = tgi("small", tokenizer=str(llama_dir))
    assert named.name == "small"
    assert named.digest != one.digest
    with pytest.raises(PolicyError, match=r"policy\.tokenizer: there is no directory nowhere"):
        tgi("nowhere")
    with pytest.raises(PolicyError, match="has no tokenizer"):
        tgi(tmp_path)


def lie(headers=None, *, text="text", **details):
    return web.json_response(
        {"generated_text": text, "details": {**tgi_sequence(text, 1, ""), **details}}, headers=headers
    )


@pytest.mark.parametrize(
    "answer",
    [
        lie(best_of_sequences=[tgi_sequence("b", 1, "")]),
        lie(finish_reason="abort"),
        lie(text="a" * 10_000_000),
        lie(tokens=[{"id": 11, "text": "text", "logprob": 0.5, "special": False}]),
        lie({"x-prompt-tokens": "9" * 5000}),
    ],
    ids=["a sequence too many", "reason", "text", "logprob", "token count"],
)
def test_an_invalid_answer_of_status_200_is_a_failure(asked, answer):
    with pytest.raises(PolicyError, match="gave up after 1 attempt"):
        asked(TgiServer([answer]))
