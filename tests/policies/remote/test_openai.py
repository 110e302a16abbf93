import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest
from aiohttp import web
from typer.testing import CliRunner

from leret.cli.app import app
from leret.config.policy import PolicySettings
from leret.core import yaml
from leret.core.errors import ConfigError, PolicyError
from leret.http.client import MALFORMED, Answer, RejectedError, RetryableError
from leret.policies.base import PromptTooLongError
from leret.policies.load import make_policy
from leret.policies.remote.openai import completions_of, policy_error, shared
from leret.policies.tool_calls import read_calls
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, TgiServer, asked, completion, refusal, run, serving

ANSWER, SECRET = completion({"seed": 1}), "sk-0123456789abcdef"


def test_several_samples_are_one_request():
    server = ChatServer()
    assert len({completion.text for completion in asked(server, 1, 2, 3, stop=("\n",))}) == 3
    [several] = server.bodies
    assert (several["n"], several["max_tokens"], several["stop"], several["model"]) == (3, 8, ["\n"], "tiny")
    assert "Authorization" not in server.requests[0].headers
    greedy = ChatServer()
    one, other = asked(greedy, 1, 2, temperature=0.0)
    assert (len(greedy.bodies), one) == (1, other)


def test_a_prompt_that_ends_with_an_answer_is_continued():
    server, plain = ChatServer(), ask("where?")
    begun = replace(plain, messages=(*plain.messages, {"role": "assistant", "content": "query:"}))
    run(server, lambda policy: policy.complete(begun))
    run(server, lambda policy: policy.complete(plain))
    first, second = server.bodies
    assert (first["continue_final_message"], first["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in second


def test_extra_keys_are_sent_and_are_part_of_the_digest():
    grammar = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"tools": None}}
    server = ChatServer()
    asked(server, 1, extra_body=grammar, enable_thinking=False)
    body = server.bodies[-1]
    assert body["response_format"] == {"type": "json_object"}
    assert body["chat_template_kwargs"] == {"tools": None, "enable_thinking": False}
    keys = {"kind": "openai", "model": "tiny", "urls": ["http://127.0.0.1:1/v1"]}
    plain, extra = (PolicySettings.model_validate({**keys, **more}) for more in ({}, {"extra_body": grammar}))
    assert len({plain, extra}) == 2
    assert make_policy(plain).digest != make_policy(extra).digest
    assert extra.grammar == ["response_format"]
    with pytest.raises(ValueError, match="temperature"):
        PolicySettings.model_validate({**keys, "extra_body": {"temperature": 0}})


@pytest.mark.parametrize(
    "server",
    [ChatServer(most_n=1), ChatServer([refusal("n must be 1")], most_n=1), ChatServer(most_n=2)],
    ids=["ignores n", "refuses n", "so many are too many"],
)
def test_without_n_each_sample_is_a_request_with_a_seed(server):
    assert len({completion.text for completion in asked(server, 1, 2, 3)}) == 3
    assert [body.get("n") for body in server.bodies][-3:] == [None] * 3
    assert len({body["seed"] for body in server.bodies[-3:]}) == 3


def test_together_has_its_request_keys_and_model_list(monkeypatch):
    monkeypatch.setenv("TOGETHER_API_KEY", "tgp_v1_this_is_the_secret")
    server = ChatServer(models=("tiny",), bare_list=True)

    async def work(policy):
        assert await policy.served() == ["tiny"]
        return await policy.complete(ask("the city", 1, 2, 3))

    first, *_ = run(server, work, kind="together", logprobs=True)
    assert (first.token_ids, first.logprobs, first.n_prompt_tokens) == ((5, 6), (-0.5, -1.0), 5)
    request = server.bodies[-1]
    assert (request["n"], request["logprobs"], "return_token_ids" in request) == (3, 1, False)


@pytest.mark.parametrize("path", ["", "/generate", "/v1/"])
def test_tgi_is_a_chat_server_at_its_root(path):
    server = TgiServer([web.json_response({"error": "out of memory"}, status=424)])

    async def main():
        async with serving(server) as [url]:
            keys = {"model": "tiny", "tokenizer": "", "best_of": False, "enable_thinking": False}
            policy = make_policy(PolicySettings.model_validate({"kind": "tgi", "urls": [url + path], **keys}))
            several, one = ask("the city", 1, 2, stop=(".",)), replace(ask("the city", 3), top_p=0.5)
            async with aclosing(policy):
                return await policy.complete(several) + await policy.complete(several) + await policy.complete(one)

    *several, one = asyncio.run(main())
    assert [completion.text for completion in several[2:]] == [f"text {body['seed']}" for body in server.bodies[-3:-1]]
    assert several[:2] == several[2:]
    assert (one.logprobs, one.n_prompt_tokens, one.n_completion_tokens) == ((-0.5, -1.0), 5, 2)
    assert [body.get("top_p") for body in server.bodies[-3:]] == [None, None, 0.5]
    assert set(server.paths) == {"/v1/chat/completions"}


TOO_LONG = {
    "vLLM": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    "vLLM's decoder": "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "SGLang": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "llama.cpp": "the request exceeds the available context size",
    "TGI and Together": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
}


def test_a_prompt_beyond_the_models_positions_is_too_long():
    for text in TOO_LONG.values():
        assert isinstance(policy_error(RejectedError(text, 400)), PromptTooLongError)
    other = "max_tokens is too large: this model writes at most 4096 tokens"
    for status, text in ((401, TOO_LONG["vLLM"]), (400, other)):
        assert type(policy_error(RejectedError(text, status))) is PolicyError


def choice(message=None, **changes):
    completions = {**ANSWER["choices"][0], **changes}
    return {**ANSWER, "choices": [{**completions, "message": {**completions["message"], **(message or {})}}]}


def logprob(value):
    return choice(logprobs={"content": [{"token": "a", "logprob": value}]})


TEXT = {"type": "text", "text": "Nile"}
LIES = {
    "an error beside the choices": ({**ANSWER, "error": {"message": "upstream is away"}}, "upstream is away"),
    "an error in a choice": (choice(error={"message": "out of memory"}, finish_reason="error"), "out of memory"),
    "no tool call": (choice({"content": None, "tool_calls": []}, finish_reason="tool_calls"), "content is not text"),
    "reasoning alone": (choice({"content": "", "reasoning_content": "hmm"}), "reasoning without content"),
    "reasoning cut off": (choice({"content": None, "reasoning": "hmm"}, finish_reason="length"), "policy.max_tokens"),
    "a part of thinking": (choice({"content": [{"type": "thinking", "thinking": "hmm"}]}), "reasoning without content"),
    "a part without text": (choice({"content": [TEXT, {"type": "image_url"}]}), "type image_url without text"),
    "deep JSON in a field": ('{"choices": ' + "[" * 900 + "]" * 900 + "}", "list indices"),
    "another number of choices": ({**ANSWER, "choices": ANSWER["choices"] * 2}, "2 choices for n=1"),
    "a log-probability of 400 digits": (logprob(10**400), "too large"),
    "a text far above max_tokens": (choice({"content": "a" * 10_000_000}), "10000000 characters exceeds max_tokens=16"),
}


def read(value, n=1, max_tokens=16):
    text = value if isinstance(value, str) else json.dumps(value)
    return completions_of(Answer("http://a/v1", 200, {}, text.encode()), n, max_tokens)


@pytest.mark.parametrize("name", LIES)
def test_an_invalid_answer_of_status_200_has_a_cause(name):
    lie, cause = LIES[name]
    with pytest.raises((RetryableError, *MALFORMED), match=f"(?i){cause}"):
        read(lie)


STOPS = ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "STOP", "COMPLETE", "tool_calls", "", None)
CUTS = ("length", "max_tokens", "MAX_TOKENS", "model_length", "max_new_tokens", "max_output_tokens")


def test_a_finish_reason_says_whether_a_limit_cut_the_text():
    for reason in (*STOPS, *CUTS):
        [completion] = read(choice(finish_reason=reason))
        assert completion.finish_reason == ("length" if reason in CUTS else "stop"), reason
    usage = {"usage": {"completion_tokens": 8}}
    for max_tokens, finish in ((8, "length"), (9, "stop")):
        [completion] = read({**choice(finish_reason=None), **usage}, max_tokens=max_tokens)
        assert completion.finish_reason == finish


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        ({"content": "half a"}, "content_filter", "content filter ended it .content_filter."),
        ({"content": None}, "SAFETY", "content filter ended it"),
        ({"content": None, "refusal": "I cannot help."}, "stop", "the model refused: I cannot help"),
    ],
)
def test_a_filtered_completion_is_refused_without_retries(message, reason, says):
    with pytest.raises(RejectedError, match=f"{says}.*change the prompt, or use another model"):
        read(choice(message, finish_reason=reason))


def test_content_parts_are_joined():
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "A river is wanted."}]}
    several = [{"type": "reasoning", "text": "hmm"}, {"type": "output_text", "text": "the "}, "Blue ", TEXT]
    for content, text in ((TEXT, "Nile"), ([thought, TEXT], "Nile"), (several, "the Blue Nile")):
        assert read(choice({"content": content}))[0].text == text


def test_a_text_cut_at_a_stop_string_has_no_other_tokens():
    value = choice({"content": "Nile. And more"}, token_ids=[1, 2, 3, 4], finish_reason="length")
    for stop, ids, text in ((("more",), (1, 2, 3, 4), "Nile. And "), ((".",), None, "Nile")):
        answer = Answer("http://a/v1", 200, {}, json.dumps(value).encode())
        [completion] = completions_of(answer, 1, 16, stop)
        assert (completion.text, completion.token_ids, completion.finish_reason) == (text, ids, "stop")


def body(*texts, **usage):
    choices = [{"index": i, "message": {"content": text}, "finish_reason": "stop"} for i, text in enumerate(texts)]
    return {"choices": choices[::-1], "usage": usage}


def test_choices_are_in_the_order_of_their_index_and_share_tokens_by_length():
    with pytest.raises(ValueError, match="same index"):
        read({"choices": [ANSWER["choices"][0]] * 2}, 2)
    assert [c.text for c in read(body("one"), 2)] == ["one"]
    # 10 tokens over texts of 2, 2 and 6 characters: 2, 2 and 6; of 7 tokens: ends at 1.4, 2.8 and 7, so 1, 1 and 5.
    for total, shares in ((10, [2, 2, 6]), (7, [1, 1, 5]), (0, [0, 0, 0])):
        completions = read(body("ab", "cd", "efghij", prompt_tokens=7, completion_tokens=total), 3)
        assert [(c.text, c.n_prompt_tokens) for c in completions] == [("ab", 7), ("cd", 7), ("efghij", 7)]
        assert [completion.n_completion_tokens for completion in completions] == shares
    assert shared([0, 0, 0], 4) == [1, 1, 2]


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({"logprobs": {"token_ids": [4.0], "token_logprobs": [-0.5]}}, ((4,), (-0.5,), 1)),
        ({"logprobs": {"content": [{"logprob": -1}] * 2}, "token_ids": [4, 9]}, ((4, 9), (-1.0, -1.0), 2)),
        ({"token_ids": [4, 9, 2]}, ((4, 9, 2), None, 3)),
    ],
    ids=["Together", "OpenAI and vLLM", "vLLM"],
)
def test_log_probabilities_and_token_ids_are_read(keys, tokens):
    [completions] = read({"choices": [{"message": {"content": "a"}, **keys}], "usage": {"completion_tokens": 9}})
    assert (completions.token_ids, completions.logprobs, completions.n_completion_tokens) == tokens


def test_a_run_stores_and_prints_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    recipe, run = tmp_path / "r.yaml", tmp_path / "run"
    sections = {
        "data": {"kind": "world", "limit": 4, "options": {}},
        "program": {"path": "pipelines/multihop.py:MultiHop", "adapter": {"kind": "compact"}},
        "sampling": {"prompts": 1, "samples": 2, "max_error_rate": 1.0},
    }

    async def main():
        async with serving(ChatServer([None] * 3 + [refusal(f"no {SECRET}")] * 40), under="/v1") as urls:
            policy = {"kind": "openai", "model": "m", "api_key_env": "TINY_KEY", "retry_for_s": 0, "urls": urls}
            recipe.write_text(yaml.dump({**sections, "policy": policy}))
            command = ["--debug", "sample", str(recipe), "--run", str(run)]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            return result.output + (result.stderr or "")

    output = asyncio.run(main())
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert any(path.name == "rollouts.db" for path in files), output
    assert any(b"[key]" in content for content in files.values()), "no refusal was stored, so this proves nothing"
    assert [path for path, content in files.items() if SECRET.encode() in content] == []
    assert SECRET not in output


def test_a_missing_key_is_refused_before_sending(monkeypatch):
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    for keys in ({"kind": "openai", "urls": ["http://a/v1"], "api_key_env": "TINY_KEY"}, {"kind": "together"}):
        with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*_KEY is not set"):
            make_policy(PolicySettings.model_validate({"model": "tiny", **keys}))


def test_tools_are_sent_and_tool_calls_read():
    # Ollama sends the arguments as an object.
    functions = [{"name": "look", "arguments": {"b": 1, "a": 2}}, {"name": "stop", "arguments": "{}"}]
    message = {"content": "so", "tool_calls": [{"function": function} for function in functions]}
    server = ChatServer([web.json_response(choice(message, finish_reason="tool_calls"))])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    plain = ask("the city", 1)
    request = replace(plain, messages=({**plain.messages[0], "tools": json.dumps(tools)},))
    [one] = run(server, lambda policy: policy.complete(request))
    calls = [{"name": "look", "arguments": {"b": 1, "a": 2}}, {"name": "stop", "arguments": {}}]
    assert (read_calls(one.text), one.finish_reason) == (("so", calls), "stop")
    assert (server.bodies[0]["tools"], server.bodies[0]["messages"]) == (tools, list(plain.messages))
