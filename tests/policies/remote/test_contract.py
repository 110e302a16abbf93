"""What every kind of served policy makes of failures. Retries: tests/http."""

from __future__ import annotations

import gzip
import logging
from copy import deepcopy
from typing import Any

import pytest
from aiohttp import web

import leret.http.answers
from leret.core.errors import ConfigError, PolicyError
from leret.policies.base import PromptTooLongError, Request
from tests.policies.servers import ChatServer, Served, TgiServer, asked, run

SECRET = "sk-0123456789abcdef"
KINDS = {
    "openai": (ChatServer, {"api_key_env": "TINY_KEY"}),
    "together": (ChatServer, {}),
    "tgi": (TgiServer, {"api_key_env": "TINY_KEY"}),
}


class Contract:
    """A kind: its server, and settings that name the secret key."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self.server, given = KINDS[kind]
        self.settings = {"kind": kind, **given, **settings}

    def asked(self, server: Served, **settings: Any) -> Any:
        return asked(server, **{**self.settings, **settings})


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Contract:
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    monkeypatch.setenv("TOGETHER_API_KEY", SECRET)
    if request.param == "openai":
        return Contract("openai")
    pytest.importorskip({"tgi": "text_generation", "together": "together"}[request.param])
    tgi = request.param == "tgi"
    return Contract(request.param, **({"model": str(request.getfixturevalue("llama_dir"))} if tgi else {}))


def json_of(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (web.Response(status=429, headers={"Retry-After": "60"}), "rate_limit"),
        (json_of({"error": {"message": "busy"}}, 503), "overloaded"),
        (web.Response(text='{"choices": [{"mess'), "malformed"),
        (json_of([]), "malformed"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
    ids=["429", "503", "truncated", "shape", "reset", "stall"],
)
def test_a_passing_failure_has_its_kind(kind: Contract, fault: Any, name: str) -> None:
    with pytest.raises(PolicyError, match="gave up after 1 attempt") as caught:
        kind.asked(kind.server([fault]), **({"timeout_s": 0.4} if fault == "stall" else {}))
    assert caught.value.exit_code == 1
    assert getattr(caught.value.__cause__, "kind", "") == name


def test_a_passing_failure_is_made_again_where_there_is_time(kind: Contract) -> None:
    assert kind.asked(kind.server([web.Response(status=500)]), retry_for_s=10.0)[0].text == "text 1.0"


@pytest.mark.parametrize(
    "fault",
    [
        json_of({"error": {"message": f"bad key: {SECRET}"}}, 401),
        json_of({"error": {"message": f"upstream of {SECRET} is away"}, "choices": []}),
        web.Response(text=f"<p>{'x' * 280} {SECRET}</p>", content_type="application/json"),
        web.Response(body=gzip.compress(bytes(2**21)), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["refusal", "an error of status 200", "HTML", "a bomb"],
)
def test_a_failure_repeats_no_key(
    kind: Contract, fault: web.Response, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 2**20)
    caplog.set_level(logging.DEBUG)
    server = kind.server([fault])
    with pytest.raises(PolicyError) as caught:
        kind.asked(server)
    assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"
    assert caught.value.exit_code == (2 if fault.status == 401 else 1)
    assert (r"401: bad key: [key]; correct the key" in str(caught.value)) is (fault.status == 401)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET[:8] not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    assert SECRET[:8] not in caplog.text


def test_a_refusal_is_not_sent_again(kind: Contract) -> None:
    server = kind.server([json_of({"error": "Input validation error: `inputs` must have less than 99 tokens"}, 422)])
    with pytest.raises(PromptTooLongError, match="answered 422: Input validation"):
        kind.asked(server, retry_for_s=60.0)
    assert len(server.bodies) == 1


def test_a_missing_key_is_said_before_anything_is_sent(kind: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINY_KEY")
    monkeypatch.delenv("TOGETHER_API_KEY")
    with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*_KEY is not set"):
        kind.asked(kind.server())


def test_a_request_for_no_completion_is_refused_and_a_copy_is_the_policy_itself(kind: Contract) -> None:
    async def work(policy: Any) -> None:
        assert deepcopy(policy) is policy
        assert SECRET not in repr(policy)
        with pytest.raises(PolicyError, match="no completion"):
            await policy.complete(Request((), (), 1.0, 8))

    run([kind.server()], work, **kind.settings)
