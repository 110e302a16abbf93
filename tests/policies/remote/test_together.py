"""The Together policy with the real SDK, against a server that speaks its protocol. Failures: test_contract."""

from __future__ import annotations

import pytest

from tests.policies.servers import ChatServer, asked

pytest.importorskip("together", reason="pip install 'leret[together]'")


def test_samples_come_back_through_the_sdk_with_tokens_and_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", "tgp_v1_this_is_the_secret")
    server = ChatServer()
    own = asked(server, 1, 2, 3, stop=("\n",), kind="together", logprobs=True)
    assert len({one.text for one in own}) == 3
    assert (own[0].token_ids, own[0].logprobs, own[0].n_prompt_tokens) == ((5, 6), (-0.5, -1.0), 5)
    assert [body["n"] for body in server.bodies] == [2, 3]  # a probe, and the request
    told = {"model": "tiny", "stop": ["\n"], "logprobs": 1, "max_tokens": 8}
    assert {name: server.bodies[1][name] for name in told} == told
