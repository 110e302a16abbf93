from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from leret.http.messages import retry_after_s
from leret.policies.remote.replies import (
    PromptTooLongError,
    RefusedError,
    TryAgainError,
    check_status,
    completions_of,
    shared,
)

URL = "http://a/v1/chat/completions"


def body(*texts: Any, **usage: int) -> str:
    choices = [
        {"index": len(texts) - 1 - i, "message": {"content": text}, "finish_reason": "stop"}
        for i, text in enumerate(reversed(texts))
    ]
    return json.dumps({"choices": choices, "usage": usage})


def test_choices_come_in_the_order_of_their_index() -> None:
    own = completions_of(body("one", "two", prompt_tokens=7, completion_tokens=6), 2, 16, URL)
    assert [completion.text for completion in own] == ["one", "two"]
    assert [completion.n_prompt_tokens for completion in own] == [7, 7]
    assert [completion.n_completion_tokens for completion in own] == [3, 3]
    assert own[0].logprobs is None


def test_tokens_that_are_counted_together_are_shared_by_length_and_add_up() -> None:
    # 10 tokens over texts of 2, 2 and 6 characters: 2, 2 and 6; of 7 tokens: ends at 1.4, 2.8 and 7, so 1, 1 and 5.
    for total, shares in ((10, [2, 2, 6]), (7, [1, 1, 5]), (0, [0, 0, 0])):
        own = completions_of(body("ab", "cd", "efghij", prompt_tokens=7, completion_tokens=total), 3, 16, URL)
        assert [completion.n_completion_tokens for completion in own] == shares
    assert shared([0, 0, 0], 4) == [1, 1, 2]


def test_togethers_logprobs_are_read_too() -> None:
    choice = {"message": {"content": "a"}, "logprobs": {"token_ids": [4.0], "token_logprobs": [-0.5], "tokens": ["a"]}}
    [own] = completions_of(json.dumps({"choices": [choice], "usage": {"completion_tokens": 9}}), 1, 16, URL)
    assert (own.token_ids, own.logprobs, own.n_completion_tokens) == ((4,), (-0.5,), 1)


def test_logprobs_and_token_ids_are_taken_where_they_are_given() -> None:
    choice = {
        "index": 0,
        "message": {"content": "a b"},
        "finish_reason": "length",
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": " b", "logprob": -1}]},
        "token_ids": [4, 9],
    }
    [own] = completions_of(json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3}}), 1, 16, URL)
    assert own.logprobs == (-0.5, -1.0)
    assert own.token_ids == (4, 9)
    assert own.n_completion_tokens == 2
    assert own.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "n"),
    [("{", 1), ("[]", 1), ("{}", 1), (body("one"), 2), (body(None), 1), (json.dumps({"choices": [{}]}), 1)],
)
def test_an_answer_that_makes_no_sense_is_asked_for_again(text: str, n: int) -> None:
    with pytest.raises(TryAgainError):
        completions_of(text, n, 16, URL)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_an_overload_or_an_outage_is_tried_again(status: int) -> None:
    with pytest.raises(TryAgainError) as caught:
        check_status(status, {"Retry-After": "3"}, "busy", URL)
    assert caught.value.wait_s == 3.0
    assert caught.value.blame == (status != 429)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_any_other_refusal_is_final_and_says_what_the_server_said(status: int) -> None:
    with pytest.raises(RefusedError, match=f"{status}: no such model"):
        check_status(status, {}, json.dumps({"error": {"message": "no such model"}}), URL)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"),
        (400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
        (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        (400, "the request exceeds the available context size"),
        (422, "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000"),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"),
    ],
    ids=["vLLM", "vLLM's decoder", "SGLang", "llama.cpp", "TGI", "TGI and Together"],
)
def test_a_prompt_beyond_the_served_models_positions_is_too_long(status: int, said: str) -> None:
    with pytest.raises(PromptTooLongError, match=f"answered {status}") as caught:
        check_status(status, {}, json.dumps({"error": said}), URL)
    assert caught.value.status == status
    with pytest.raises(RefusedError) as other:
        check_status(status, {}, '{"error": "max_tokens is too large: this model writes at most 4096 tokens"}', URL)
    assert not isinstance(other.value, PromptTooLongError)


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s({"Retry-After": date}) == pytest.approx(30, abs=3)
    assert retry_after_s({"Retry-After": "1000000"}) == 120.0
    assert retry_after_s({"Retry-After": "nan"}) is None
    assert retry_after_s({"Retry-After": "soon"}) is None
    assert retry_after_s({}) is None


def test_an_error_of_deep_json_is_told_as_it_came() -> None:
    with pytest.raises(RefusedError, match=r"400: \[\[\["):
        check_status(400, {}, "[" * 200_000, URL)
