"""Failures and probes of all kinds of served policies. Retries: tests/http."""

import contextlib
import gzip
import logging
import socket
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
from aiohttp import web

import leret.http.answers
from leret.core.errors import ConfigError, PolicyError
from leret.policies import load
from leret.policies.base import PromptTooLongError, Request
from leret.policies.remote import openai
from tests.policies.servers import ChatServer, TgiServer, asked, probed, refusal, run

SECRET = "sk-0123456789abcdef"


@pytest.fixture(params=["openai", "together", "tgi"])
def kind(request, monkeypatch):
    for key in ("OPENAI_KEY", "TOGETHER_API_KEY", "TGI_KEY"):
        monkeypatch.setenv(key, f"{SECRET}\n")
    monkeypatch.setattr(openai, "LIST_S", 0.5)
    monkeypatch.setattr(load, "PROBE_S", 0.5)
    keys = {} if request.param == "together" else {"api_key_env": f"{request.param.upper()}_KEY"}
    settings = {"kind": request.param, "model": "tiny", **keys}
    server = TgiServer if request.param == "tgi" else ChatServer
    return SimpleNamespace(server=server, settings=settings, asked=partial(asked, **settings))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (web.Response(status=429, headers={"Retry-After": "60"}), "rate_limit"),
        (refusal("busy", 503), "overloaded"),
        (web.Response(text='{"choices": [{"mess'), "malformed"),
        (web.json_response([]), "malformed"),
        ("reset", "connection"),
        ("stall", "timeout"),
    ],
)
def test_a_transient_failure_has_a_kind(kind, fault, name):
    with pytest.raises(PolicyError, match="gave up after 1 attempt") as caught:
        kind.asked(kind.server([fault]), **({"timeout_s": 0.4} if fault == "stall" else {}))
    assert (caught.value.exit_code, getattr(caught.value.__cause__, "kind", "")) == (1, name)


@pytest.mark.parametrize(
    "fault",
    [
        refusal(f"bad key: {SECRET}", 401),
        web.json_response({"error": {"message": f"upstream of {SECRET} is away"}, "choices": []}),
        web.Response(text=f"<p>{'x' * 280} {SECRET}</p>", content_type="application/json"),
        web.Response(body=gzip.compress(bytes(2**21)), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["refusal", "an error of status 200", "HTML", "a bomb"],
)
def test_a_failure_repeats_no_key(kind, fault, monkeypatch, caplog):
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 2**20)
    caplog.set_level(logging.DEBUG)
    server = kind.server([fault])
    with pytest.raises(PolicyError) as caught:
        kind.asked(server)
    assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"
    assert caught.value.exit_code == (2 if fault.status == 401 else 1)
    assert (r"401: bad key: [key]; correct the key" in str(caught.value)) is (fault.status == 401)
    error = caught.value
    while error is not None:
        assert SECRET[:8] not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    assert SECRET[:8] not in caplog.text


def test_a_refusal_is_not_sent_again(kind):
    server = kind.server([refusal("Input validation error: `inputs` must have less than 99 tokens", 422)])
    with pytest.raises(PromptTooLongError, match="answered 422: Input validation"):
        kind.asked(server, retry_for_s=60.0)
    assert len(server.bodies) == 1


def test_a_missing_key_or_seed_is_refused_before_sending(kind, monkeypatch):
    async def work(policy):
        assert deepcopy(policy) is policy
        with pytest.raises(PolicyError, match="no completion"):
            await policy.complete(Request((), (), 1.0, 8))

    run(kind.server(), work, **kind.settings)
    for key in ("OPENAI_KEY", "TOGETHER_API_KEY", "TGI_KEY"):
        monkeypatch.delenv(key)
    with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*_KEY is not set"):
        kind.asked(kind.server())


def test_a_server_that_accepts_no_connection_is_reported(kind):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        clients = [waiting.enter_context(socket.socket()) for _ in range(4)]
        for client in clients:
            client.settimeout(0.2)
        if [client.connect_ex(full.getsockname()) for client in clients][-1] == 0:
            pytest.skip("this kernel accepts connections beyond a full backlog")
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        with pytest.raises(PolicyError, match=f"{url}.*cannot be reached"):
            probed(**{**kind.settings, "urls": (url,)})
