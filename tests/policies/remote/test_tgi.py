"""The TGI policy with the types of the real text-generation package, which is also the peer of the server here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leret.config.policy import TgiPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import Request
from tests.policies.conftest import ask
from tests.policies.servers import TgiServer, serving

text_generation = pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")

from leret.policies.remote.tgi import TgiPolicy  # noqa: E402

TOKEN = {"id": 11, "text": "text", "logprob": -0.5, "special": False}
DETAILS = {"finish_reason": "length", "generated_tokens": 1, "seed": 1, "prefill": [], "tokens": [TOKEN]}


def tgi(model: Path | str, urls: list[str], **settings: Any) -> TgiPolicy:
    given = {"model": str(model), "urls": tuple(urls), "retry_for_s": 5.0, **settings}
    return TgiPolicy(TgiPolicySettings.model_validate(given))


@pytest.fixture
def run(llama_dir: Path) -> Callable[..., Any]:
    def go(servers: list[TgiServer], work: Callable[[TgiPolicy], Awaitable[Any]], **kwargs: Any) -> Any:
        async def main() -> Any:
            async with serving(*servers) as urls:
                policy = tgi(llama_dir, urls, **kwargs)
                try:
                    return await work(policy)
                finally:
                    await policy.aclose()

        return asyncio.run(main())

    return go


def test_each_sample_is_a_request_with_its_own_seed_and_comes_back_with_its_tokens(run: Any) -> None:
    server = TgiServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, 3)))
    seeds = [body["parameters"]["seed"] for body in server.bodies]
    assert len(set(seeds)) == 3
    assert sorted(completion.text for completion in own) == sorted(f"text {seed}.0" for seed in seeds)
    assert own[0].text == "text 1.0"
    assert own[0].token_ids == (11, 12, 2)
    assert own[0].logprobs == (-0.5, -1.25, -0.125)
    assert (own[0].n_prompt_tokens, own[0].n_completion_tokens, own[0].finish_reason) == (7, 3, "stop")
    assert server.paths == ["/generate"] * 3


def test_the_text_is_what_the_models_chat_template_makes_of_the_messages(run: Any, llama_dir: Path) -> None:
    from transformers import AutoTokenizer

    server = TgiServer()
    messages = ({"role": "system", "content": "search"}, {"role": "user", "content": "the city ?"})
    run([server], lambda policy: policy.complete(Request(messages, (1,), 1.0, 8)))
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    wanted = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    assert server.bodies[0]["inputs"] == wanted
    tokens = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer(server.bodies[0]["inputs"])["input_ids"] == list(tokens)


def test_the_body_is_the_one_that_the_real_client_sends(run: Any) -> None:
    server = TgiServer()

    async def work(policy: TgiPolicy) -> Any:
        own = await policy.complete(Request(({"role": "user", "content": "the city"},), (4,), 0.7, 9, 0.5, ("\n",)))
        client = text_generation.AsyncClient(server.url, timeout=10)
        theirs = await client.generate(
            server.bodies[0]["inputs"],
            do_sample=True,
            max_new_tokens=9,
            temperature=0.7,
            top_p=0.5,
            seed=4,
            stop_sequences=["\n"],
        )
        return own[0], theirs

    own, theirs = run([server], work)
    assert server.bodies[0] == server.bodies[1]
    assert own.text == theirs.generated_text.split("\n")[0]
    assert own.token_ids == tuple(token.id for token in theirs.details.tokens)


def test_best_of_gives_the_samples_of_a_prompt_in_one_request_without_a_seed(run: Any) -> None:
    server = TgiServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, 3)), best_of=True)
    assert [completion.text for completion in own] == ["text None.0", "text None.1", "text None.2"]
    [body] = server.bodies
    assert (body["parameters"]["best_of"], body["parameters"]["seed"]) == (3, None)


def test_more_than_the_servers_best_of_is_a_refusal_with_its_words(run: Any) -> None:
    with pytest.raises(PolicyError, match=r"422: .*best_of.*<= 2"):
        run([TgiServer(most_best_of=2)], lambda policy: policy.complete(ask("the city", 1, 2, 3)), best_of=True)


def test_greedy_is_asked_once_and_samples_nothing(run: Any) -> None:
    server = TgiServer()
    own = run([server], lambda policy: policy.complete(ask("the city", 1, 2, temperature=0.0)))
    assert own[0] == own[1]
    [body] = server.bodies
    told = body["parameters"]
    assert (told["do_sample"], told["temperature"], told["seed"], told["top_p"]) == (False, None, None, None)


def test_the_stop_string_that_tgi_leaves_in_the_text_is_cut(run: Any) -> None:
    own = run([TgiServer()], lambda policy: policy.complete(ask("the city", 1, stop=("\n",))))
    assert own[0].text == "text 1.0"


def test_behind_a_gateway_with_the_root_alone_that_is_found_once(run: Any) -> None:
    server = TgiServer(root_only=True)

    async def work(policy: TgiPolicy) -> Any:
        return [await policy.complete(ask("the city", seed)) for seed in (1, 2)]

    assert len(run([server], work)) == 2
    assert server.paths == ["/generate", "/", "/"]


def test_prompt_tokens_are_counted_here_where_no_header_tells_them(run: Any) -> None:
    server = TgiServer()
    server.tells_prompt_tokens = False
    own = run([server], lambda policy: policy.complete(ask("the city", 1)))
    assert own[0].n_prompt_tokens == 4  # <|user|> the city <|assistant|>


def test_a_generation_that_failed_is_tried_again(run: Any) -> None:
    failed = web.json_response({"error": "CUDA out of memory", "error_type": "generation"}, status=424)
    [own] = run([TgiServer(faults=[failed])], lambda policy: policy.complete(ask("the city", 1)))
    assert own.text == "text 1.0"


def test_what_tgi_will_never_take_is_refused_at_once(run: Any) -> None:
    told = {"error": "Input validation error: `inputs` must have less than 1024 tokens", "error_type": "validation"}
    server = TgiServer(faults=[web.json_response(told, status=422)])
    with pytest.raises(PolicyError, match=r"422: Input validation error: .*1024 tokens"):
        run([server], lambda policy: policy.complete(ask("the city", 1)))
    assert len(server.bodies) == 1


def test_a_directory_without_a_tokenizer_or_a_template_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"policy\.tokenizer: there is no directory nowhere"):
        tgi("nowhere", ["http://a"])
    with pytest.raises(PolicyError, match="has no tokenizer"):
        tgi(tmp_path, ["http://a"])


def test_the_digest_names_the_model_and_its_template_and_not_the_address(llama_dir: Path) -> None:
    one, other = tgi(llama_dir, ["http://a"]), tgi(llama_dir, ["http://b/generate"])
    assert one.name == llama_dir.name
    assert one.digest == other.digest
    named = tgi("small", ["http://a"], tokenizer=str(llama_dir))
    assert named.name == "small"
    assert named.digest != one.digest


LIES = {
    "an empty list": web.json_response([]),
    "half an answer": web.Response(text='{"generated_text": "a", "deta'),
    "two sequences too few": web.json_response(
        {"generated_text": "a", "details": DETAILS | {"best_of_sequences": [DETAILS | {"generated_text": "b"}]}}
    ),
    "deep JSON": web.Response(text="[" * 200_000),
    "no details": web.json_response({"generated_text": "text"}),
    "a reason that is none": web.json_response(
        {"generated_text": "text", "details": DETAILS | {"finish_reason": "abort"}}
    ),
    "a text far above max_tokens": web.json_response({"generated_text": "a" * 10_000_000, "details": DETAILS}),
    "a log-probability above 0": web.json_response(
        {"generated_text": "text", "details": DETAILS | {"tokens": [TOKEN | {"logprob": 0.5}]}}
    ),
    "as many tokens as no number holds": web.json_response(
        {"generated_text": "text", "details": DETAILS}, headers={"x-prompt-tokens": "9" * 5000}
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_of_status_200_is_a_failure(run: Any, name: str) -> None:
    with pytest.raises(PolicyError, match="gave up after 1 attempt"):
        run([TgiServer([LIES[name]])], lambda policy: policy.complete(ask("the city", 1)), retry_for_s=0)
