from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web

from leret.config.load import load_recipe
from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.errors import PolicyError
from leret.policies import load
from leret.policies.load import POLICIES, PolicyKind, make_policy, policy_state, probe, shared_policy
from leret.policies.local.policy import LocalPolicy
from leret.policies.remote import openai
from leret.policies.remote.openai import OpenAIPolicy
from tests.policies.servers import ChatServer, Served, TgiServer, completion, serving


def test_a_policy_is_made_by_its_kind(llama_dir: Path) -> None:
    local = make_policy(LocalPolicySettings(model=str(llama_dir)))
    assert isinstance(local, LocalPolicy)
    assert local.name == "tiny-llama"
    assert isinstance(make_policy(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",))), OpenAIPolicy)


def test_a_new_kind_is_a_settings_class_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ToySettings(PolicySettings):
        kind: Literal["toy"] = "toy"
        model: str = "parrot"

    class Toy:
        def __init__(self, settings: ToySettings) -> None:
            self.settings, self.name = settings, settings.model

    monkeypatch.setitem(POLICIES, "toy", PolicyKind(ToySettings, Toy))
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(
        "data: {kind: jsonl, questions: toy.yaml, corpus: toy.yaml}\npolicy: {kind: toy, temperature: 0.5}\n"
    )
    policy: Any = make_policy(load_recipe(recipe, SamplingRecipe).policy)
    assert policy.name == "parrot"
    assert policy_state(policy) == {"kind": "toy", "temperature": 0.5}
    asyncio.run(probe(ToySettings()))  # it is behind no server


def test_equal_settings_share_a_policy_until_it_is_closed(llama_dir: Path) -> None:
    settings = LocalPolicySettings(model=str(llama_dir))
    one = shared_policy(settings)
    assert shared_policy(settings.model_copy(update={"temperature": 0.3})) is one
    assert isinstance(one, LocalPolicy)
    one.close()
    assert shared_policy(settings) is not one


def test_a_state_loads_the_policy_again_and_holds_no_key(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-secret")
    served = make_policy(OpenAIPolicySettings(model="tiny", urls=("http://a/v1",), api_key_env="TINY_KEY"))
    state = policy_state(served)
    assert "sk-secret" not in str(state)
    assert shared_policy(PolicySettings.model_validate(state)).digest == served.digest
    local = policy_state(LocalPolicy(llama_dir, enable_thinking=False))
    assert local == {"kind": "local", "model": str(llama_dir), "enable_thinking": False}
    with pytest.raises(PolicyError, match="cannot be saved by name"):
        policy_state(object())  # type: ignore[arg-type]


def probed(*servers: Served, under: str = "/v1", path: str = "/v1", **settings: Any) -> None:
    async def main() -> None:
        async with serving(*servers, under=under) as urls:
            own = [url.removesuffix("/v1") + path for url in urls]
            await probe(PolicySettings.model_validate({"kind": "openai", "model": "tiny", "urls": own, **settings}))

    asyncio.run(main())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def within(seconds: float) -> None:
        monkeypatch.setattr(openai, "LIST_S", seconds)
        monkeypatch.setattr(load, "PROBE_S", seconds)

    return within


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"urls": ("http://127.0.0.1:9/v1",)}, r"http://127\.0\.0\.1:9/v1/models cannot be reached"),
        ({"path": ""}, r"/chat/completions answered 404.*is /v1 missing at the end of policy\.urls\?"),
        ({"path": "/v2"}, "/v2/chat/completions answered 404"),
        ({"model": "large"}, "/v1/chat/completions answered 404: no model large.*it serves tiny, small"),
        ({"api_key_env": "WRONG_KEY"}, r"/v1/chat/completions answered 401: wrong key; correct the key \(api_key_env"),
    ],
    ids=["dead", "without /v1", "wrong path", "wrong model", "wrong key"],
)
def test_a_dead_or_wrong_server_is_told_in_seconds(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, quick: Callable[[float], None]
) -> None:
    monkeypatch.setenv("WRONG_KEY", "sk-wrong")
    quick(1.0)
    server = ChatServer(models=("tiny", "small"), unknown=("large",))
    server.key = "sk-right" if "api_key_env" in settings else None
    began = time.monotonic()
    with pytest.raises(PolicyError, match=told) as caught:
        probed(server, **settings)
    assert time.monotonic() - began < 4
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
        ChatServer([web.Response(status=503)], models=("tiny",)),
        ChatServer([None, *[web.json_response({**completion({"seed": 1}), "choices": [
            {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}]})] * 9], models=("other",)),
    ],
    ids=["listed", "any name is taken", "no list", "still loading", "reasons"],
)  # fmt: skip
def test_a_server_that_will_do_is_let_pass(server: ChatServer) -> None:
    probed(server)
    assert all(body["max_tokens"] == 1 for body in server.bodies)


def kinds(llama_dir: Path, monkeypatch: pytest.MonkeyPatch, *faults: Any) -> list[tuple[Served, dict[str, Any]]]:
    """Servers of every kind, and the settings of their policies."""
    pytest.importorskip("text_generation", reason="pip install --no-deps text-generation")
    pytest.importorskip("together", reason="pip install 'leret[together]'")
    monkeypatch.setenv("TOGETHER_API_KEY", "sk-right")
    return [
        (ChatServer([None, *faults], models=("other",)), {}),
        (TgiServer([*faults]), {"kind": "tgi", "model": str(llama_dir), "path": ""}),
        (ChatServer([*faults]), {"kind": "together", "model": "small"}),
    ]


def test_all_kinds_are_probed_by_a_token(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for server, settings in kinds(llama_dir, monkeypatch):
        probed(server, **settings)
        assert len(server.bodies) == 1


def test_a_server_that_is_late_with_its_first_token_is_let_pass(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch, quick: Callable[[float], None]
) -> None:
    quick(0.5)
    for server, settings in kinds(llama_dir, monkeypatch, "stall"):
        probed(server, **settings)
        assert len(server.bodies) == 1


def test_a_server_that_accepts_no_connection_is_told(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch, quick: Callable[[float], None]
) -> None:
    quick(0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with socket.socket() as one_more:
            one_more.settimeout(0.5)
            if one_more.connect_ex(full.getsockname()) == 0:
                pytest.skip("this kernel accepts connections beyond a full backlog")
        for _, settings in kinds(llama_dir, monkeypatch):
            url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
            with pytest.raises(PolicyError, match=f"{url}.*cannot be reached"):
                probed(**{**settings, "urls": (url,)})
