from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError, PolicyError
from leret.policies import load
from leret.policies.load import load_policy, policy_state, probe, shared_policy
from leret.policies.local.policy import LocalPolicy
from leret.policies.remote.openai import OpenAIPolicy
from tests.policies.servers import ChatServer, Served, TgiServer, TogetherServer, completion, serving


def test_a_policy_is_loaded_by_its_kind(llama_dir: Path) -> None:
    local = load_policy("local", llama_dir, threads=1)
    assert isinstance(local, LocalPolicy)
    assert local.name == "tiny-llama"
    served = load_policy("openai", "tiny", urls=["http://a/v1"])
    assert isinstance(served, OpenAIPolicy)
    with pytest.raises(ConfigError, match="magic"):
        load_policy("magic", "tiny")


def test_equal_settings_share_a_policy_until_it_is_closed(llama_dir: Path) -> None:
    settings = PolicySettings(model=str(llama_dir))
    one = shared_policy(settings)
    assert shared_policy(settings.model_copy(update={"temperature": 0.3})) is one
    assert isinstance(one, LocalPolicy)
    one.close()
    assert shared_policy(settings) is not one


def test_a_state_loads_the_policy_again_and_holds_no_key(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-secret")
    served = load_policy("openai", "tiny", urls=["http://a/v1"], api_key_env="TINY_KEY")
    state = policy_state(served)
    assert "sk-secret" not in str(state)
    again = shared_policy(PolicySettings(**state))
    assert again.digest == served.digest
    local = policy_state(load_policy("local", llama_dir, enable_thinking=False))
    assert local == {"kind": "local", "model": str(llama_dir), "dtype": "auto", "enable_thinking": False}


def probed(*servers: Served, under: str = "/v1", path: str = "/v1", **settings: Any) -> None:
    async def main() -> None:
        async with serving(*servers, under=under) as urls:
            own = tuple(url.removesuffix("/v1") + path for url in urls)
            await probe(PolicySettings(**{"kind": "openai", "model": "tiny", "urls": own, **settings}))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"urls": ("http://127.0.0.1:9/v1",)}, r"http://127\.0\.0\.1:9/v1/models cannot be reached"),
        ({"path": ""}, r"/chat/completions answered 404.*is /v1 missing at the end of policy\.urls\?"),
        ({"path": "/v2"}, "/v2/chat/completions answered 404"),
        ({"model": "large"}, "/v1/chat/completions answered 404: no model large.*it serves tiny, small"),
        ({"api_key_env": "WRONG_KEY"}, r"/v1/chat/completions answered 401: wrong key; mend policy\.api_key_env"),
    ],
    ids=["dead", "without /v1", "wrong path", "wrong model", "wrong key"],
)
def test_a_dead_or_wrong_server_is_told_in_seconds(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG_KEY", "sk-wrong")
    server = ChatServer(models=("tiny", "small"), unknown=("large",))
    server.key = "sk-right" if "api_key_env" in settings else None
    began = time.monotonic()
    with pytest.raises(PolicyError, match=told) as caught:
        probed(server, **settings)
    assert time.monotonic() - began < 8
    assert "\n" not in str(caught.value)


def test_every_endpoint_is_probed() -> None:
    good, bad = ChatServer(models=("tiny",)), ChatServer(models=("small",), unknown=("tiny",))
    with pytest.raises(PolicyError, match="it serves small"):
        probed(good, bad)


@pytest.mark.parametrize(
    "server",
    [
        ChatServer(models=("tiny",)),
        ChatServer(models=("/models/tiny.gguf",)),
        ChatServer(),
        ChatServer([web.Response(status=503)] * 2, models=("tiny",)),
        ChatServer([None, web.json_response({**completion({"seed": 1}), "choices": [
            {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}]})] * 9, models=("other",)),
    ],
    ids=["listed", "any name is taken", "no list", "still loading", "reasons"],
)  # fmt: skip
def test_a_server_that_will_do_is_let_pass(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_LIST_S", 1.5)
    probed(server)
    assert all(body["max_tokens"] == 1 for body in server.bodies)


def kinds(llama_dir: Path, monkeypatch: pytest.MonkeyPatch, token_s: float) -> list[tuple[Served, dict[str, Any]]]:
    """Servers of every kind whose first token is late, and the settings of their policies."""
    pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")
    pytest.importorskip("together", reason="pip install 'leret[together]'")
    monkeypatch.setenv("TOGETHER_API_KEY", "sk-right")
    monkeypatch.setattr(load, "_TOKEN_S", token_s)
    return [
        (ChatServer(["stall"]), {}),
        (TgiServer(["stall"]), {"kind": "tgi", "model": str(llama_dir), "path": ""}),
        (TogetherServer(["stall"]), {"kind": "together", "model": "small"}),
    ]


def test_a_server_that_is_late_with_its_first_token_is_let_pass(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server, settings in kinds(llama_dir, monkeypatch, 0.5):
        probed(server, **settings)
        assert len(server.paths) == 1


def test_a_server_that_accepts_no_connection_is_told(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with socket.socket() as one_more:
            one_more.settimeout(0.5)
            if one_more.connect_ex(full.getsockname()) == 0:
                pytest.skip("this kernel accepts connections beyond a full backlog")
        monkeypatch.setattr(load, "_LIST_S", 0.5)
        for _, settings in kinds(llama_dir, monkeypatch, 0.5):
            url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
            with pytest.raises(PolicyError, match=f"{url}.*cannot be reached"):
                probed(**{**settings, "urls": (url,)})


def test_tgi_and_together_are_probed_by_a_token(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", "sk-right")
    monkeypatch.setattr(load, "_TOKEN_S", 1.0)
    pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")
    pytest.importorskip("together", reason="pip install 'leret[together]'")
    for server, kind, model in ((TgiServer(), "tgi", str(llama_dir)), (TogetherServer(), "together", "small")):
        probed(server, kind=kind, model=model, path="" if kind == "tgi" else "/v1")
        assert len(server.bodies) == 1
    with pytest.raises(PolicyError, match="cannot be reached"):
        probed(TgiServer(), kind="tgi", model=str(llama_dir), urls=("http://127.0.0.1:9",))
