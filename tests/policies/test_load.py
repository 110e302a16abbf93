import asyncio
import shutil
import time

import pytest
from aiohttp import web

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings, by_predictor
from leret.core.errors import PolicyError
from leret.policies import load
from leret.policies.base import Request
from leret.policies.load import make_policy, open_policies, policy_state, shared_policy
from leret.policies.local.policy import LocalPolicy
from leret.policies.remote import openai
from tests.policies.servers import ChatServer, completion, probed
from tests.sampling.fakes import FakePolicy
from tests.tiny import tiny_policy


def test_equal_settings_share_a_policy_until_it_is_closed_or_replaced(llama_dir, tmp_path):
    settings = LocalPolicySettings(model=str(shutil.copytree(llama_dir, tmp_path / "policy")))
    one = shared_policy(settings)
    assert shared_policy(settings.model_copy(update={"temperature": 0.3})) is one
    one.close()
    again = shared_policy(settings)
    assert again is not one
    tiny_policy(tmp_path / "policy", seed=1)
    assert shared_policy(settings).digest != again.digest


def test_predictors_have_policies_and_equal_ones_are_shared():
    first, other = LocalPolicySettings(model="a"), LocalPolicySettings(model="b")
    policies = {}

    def make(settings):
        policies[settings.model] = policy = FakePolicy()
        policy.digest = f"{settings.model}-digest"
        return policy

    policy = open_policies({"": first, "answer": other, "plan": other}, make)
    for predictor in ("answer", "plan", "write", ""):
        asyncio.run(policy.complete(Request((), (0,), 0.0, 8, predictor=predictor)))
    asked = {name: [request.predictor for request in one.requests] for name, one in policies.items()}
    assert asked == {"a": ["write", ""], "b": ["answer", "plan"]}
    assert policy.digest == open_policies({"plan": other, "answer": other, "": first}, make).digest
    assert policy.digest != open_policies({"": first, "answer": other}, make).digest
    assert open_policies({"": first}, make).digest == "a-digest"  # alone, it is itself


def test_a_trained_policy_replaces_that_of_its_predictors():
    assert by_predictor("first", {}, "new", ("a",)) == {"": "new"}
    assert by_predictor("first", {"a": "own"}, "new", ("a",)) == {"": "first", "a": "new"}
    assert by_predictor("first", {"a": "own"}, "new", ("b",)) == {"": "first", "a": "own", "b": "new"}
    assert by_predictor("first", {"a": "own"}, "new", None) == {"": "new", "a": "own"}


def test_a_state_restores_the_policy_without_a_key(llama_dir, monkeypatch):
    monkeypatch.setenv("TINY_KEY", "sk-secret")
    served = make_policy(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",), api_key_env="TINY_KEY"))
    state = policy_state(served)
    assert "sk-secret" not in str(state)
    assert shared_policy(PolicySettings.model_validate(state)).digest == served.digest
    local = policy_state(LocalPolicy(LocalPolicySettings(model=str(llama_dir), enable_thinking=False)))
    assert local == {"kind": "local", "model": str(llama_dir), "enable_thinking": False}
    with pytest.raises(PolicyError, match="has no settings to save"):
        policy_state(object())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ("http://127.0.0.1:9/v1",)}, r"http://127\.0\.0\.1:9/v1/models cannot be reached"),
        ({"path": ""}, r"/chat/completions answered 404.*make policy\.urls end in /v1"),
        ({"model": "large"}, "/v1/chat/completions answered 404: no model large.*it serves tiny, small"),
        ({"api_key_env": "WRONG_KEY"}, r"/v1/chat/completions answered 401: wrong key; fix the key \(api_key_env"),
    ],
    ids=["dead", "without /v1", "wrong model", "wrong key"],
)
def test_a_wrong_server_is_reported_in_seconds(settings, message, monkeypatch):
    monkeypatch.setenv("WRONG_KEY", "sk-wrong")
    monkeypatch.setattr(openai, "LIST_S", 1.0)
    monkeypatch.setattr(load, "PROBE_S", 1.0)
    good = ChatServer(models=("tiny", "large"))
    key = "sk-right" if "api_key_env" in settings else None
    bad = ChatServer(models=("tiny", "small"), unknown=("large",), key=key)
    began = time.monotonic()
    with pytest.raises(PolicyError, match=message) as caught:
        probed(good, bad, **settings)
    assert time.monotonic() - began < 4
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "server",
    [
        ChatServer(models=("/models/tiny.gguf",)),
        ChatServer(),
        ChatServer([web.Response(status=503)], models=("tiny",)),
        ChatServer([None, *[web.json_response({**completion({"seed": 1}), "choices": [
            {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}]})] * 9], models=("other",)),
        ChatServer([None, "stall"]),
    ],
    ids=["any name is taken", "no list", "still loading", "reasons", "late with its first token"],
)  # fmt: skip
def test_a_sufficient_server_passes(server, monkeypatch):
    monkeypatch.setattr(load, "PROBE_S", 1.0)
    probed(server)
    assert all(body["max_tokens"] == 1 for body in server.bodies)
