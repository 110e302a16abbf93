"""The TGI policy with the types of the real text-generation package, also the peer of the server here.

Failures: test_contract.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leret.config.policy import TgiPolicySettings
from leret.core.errors import PolicyError
from leret.policies.base import Request
from tests.policies import servers
from tests.policies.conftest import ask
from tests.policies.servers import TgiServer

text_generation = pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")

from leret.policies.remote.tgi import TgiPolicy  # noqa: E402

TOKEN = {"id": 11, "text": "text", "logprob": -0.5, "special": False}
DETAILS = {"finish_reason": "length", "generated_tokens": 1, "seed": 1, "prefill": [], "tokens": [TOKEN]}


def tgi(model: Path | str, urls: list[str], **settings: Any) -> TgiPolicy:
    return TgiPolicy(TgiPolicySettings.model_validate({"model": str(model), "urls": tuple(urls), **settings}))


@pytest.fixture
def run(llama_dir: Path) -> Any:
    return partial(servers.run, kind="tgi", model=str(llama_dir))


@pytest.fixture
def asked(llama_dir: Path) -> Any:
    return partial(servers.asked, kind="tgi", model=str(llama_dir))


def test_each_sample_is_a_request_with_its_own_seed_and_comes_back_with_its_tokens(asked: Any) -> None:
    server = TgiServer()
    own = asked(server, 1, 2, 3)
    seeds = [body["parameters"]["seed"] for body in server.bodies]
    assert len(set(seeds)) == 3
    assert sorted(completion.text for completion in own) == sorted(f"text {seed}.0" for seed in seeds)
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


def test_best_of_gives_the_samples_of_a_prompt_in_one_request_without_a_seed(asked: Any) -> None:
    server = TgiServer()
    own = asked(server, 1, 2, 3, best_of=True)
    assert [completion.text for completion in own] == ["text None.0", "text None.1", "text None.2"]
    [body] = server.bodies
    assert (body["parameters"]["best_of"], body["parameters"]["seed"]) == (3, None)


def test_more_than_the_servers_best_of_is_a_refusal_with_its_words(asked: Any) -> None:
    with pytest.raises(PolicyError, match=r"422: .*best_of.*<= 2"):
        asked(TgiServer(most_best_of=2), 1, 2, 3, best_of=True)


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


def test_prompt_tokens_are_counted_here_where_no_header_tells_them(asked: Any) -> None:
    server = TgiServer()
    server.tells_prompt_tokens = False
    own = asked(server)
    assert own[0].n_prompt_tokens == 4  # <|user|> the city <|assistant|>


def test_a_generation_that_failed_is_tried_again(asked: Any) -> None:
    failed = web.json_response({"error": "CUDA out of memory", "error_type": "generation"}, status=424)
    assert asked(TgiServer([failed]), retry_for_s=5.0)[0].text == "text 1.0"


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


def lie(headers: dict[str, str] | None = None, *, text: str = "text", **details: Any) -> web.Response:
    return web.json_response({"generated_text": text, "details": {**DETAILS, **details}}, headers=headers)


@pytest.mark.parametrize(
    "told",
    [
        lie(best_of_sequences=[{**DETAILS, "generated_text": "b"}]),
        web.json_response({"generated_text": "text"}),
        lie(finish_reason="abort"),
        lie(text="a" * 10_000_000),
        lie(tokens=[{**TOKEN, "logprob": 0.5}]),
        lie({"x-prompt-tokens": "9" * 5000}),
    ],
    ids=["a sequence too many", "no details", "reason", "text", "logprob", "token count"],
)
def test_a_lie_of_status_200_is_a_failure(asked: Any, told: web.Response) -> None:
    with pytest.raises(PolicyError, match="gave up after 1 attempt"):
        asked(TgiServer([told]))
