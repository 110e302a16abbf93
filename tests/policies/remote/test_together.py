"""The Together policy with the real SDK, against a server that speaks its protocol. Failures: test_contract."""

from __future__ import annotations

import pytest
from aiohttp import web

from leret.core.errors import PolicyError
from tests.policies.conftest import ask
from tests.policies.servers import ChatServer, asked, run

pytest.importorskip("together", reason="pip install 'leret[together]'")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", "tgp_v1_this_is_the_secret")


def test_a_sample_comes_back_through_the_sdk_with_tokens_and_log_probabilities() -> None:
    server = ChatServer()
    request = ask("the city", 1, stop=("\n",))
    [own] = run([server], lambda policy: policy.complete(request), kind="together", logprobs=True)
    assert (own.text, own.token_ids, own.logprobs) == ("text 1.0", (5, 6), (-0.5, -1.0))
    assert (own.n_prompt_tokens, own.n_completion_tokens) == (5, 2)
    [body] = server.bodies
    assert (body["model"], body["stop"], body["logprobs"], body["max_tokens"]) == ("tiny", ["\n"], 1, 8)


def test_several_samples_are_one_request_after_a_probe() -> None:
    server = ChatServer()
    assert len({completion.text for completion in asked(server, 1, 2, 3, kind="together")}) == 3
    assert [body.get("n") for body in server.bodies] == [2, 3]


def test_another_number_of_choices_is_a_failure() -> None:
    lie = web.json_response({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]})
    with pytest.raises(PolicyError, match="2 choices for n=1"):
        asked(ChatServer([lie]), kind="together")
