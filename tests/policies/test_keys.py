"""A key comes from the environment, goes into one header, and is found nowhere else."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from leret.http.secrets import Key
from typer.testing import CliRunner

from leret.cli.app import app
from leret.config.load import load_recipe
from leret.config.policy import PolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core import yaml
from leret.core.errors import ConfigError, PolicyError
from leret.policies.load import load_policy, policy_of, policy_state
from leret.policies.remote import dispatch
from tests.policies.conftest import ask
from tests.policies.servers import Served, serving

SECRET = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)


class Echo(Served):
    """Repeats the key that it was sent in whatever it says."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await self.met(request)
        told = {"error": {"message": f"bad key: {request.headers['Authorization']}"}}
        return web.json_response(told, status=self.status)


def failing(status: int, **settings: Any) -> str:
    """All that a failed call leaves behind: the error, what it came from, and the traceback of --debug."""

    async def main() -> str:
        async with serving(Echo(status), under="/v1") as urls:
            policy = policy_of(PolicySettings(kind="openai", model="m", urls=tuple(urls), **settings))
            try:
                await policy.complete(ask("the city", 1))
            except PolicyError as error:
                causes = []
                cause: BaseException | None = error
                while cause is not None:
                    causes += [repr(cause), repr(vars(cause))]
                    cause = cause.__cause__ or cause.__context__
                return "".join([*causes, *traceback.format_exception(error), repr(policy), repr(vars(policy))])
            finally:
                await policy.aclose()
        raise AssertionError("the server answers with errors alone")

    return asyncio.run(main())


@pytest.mark.parametrize("status", [401, 500])
def test_an_error_does_not_repeat_the_key_that_the_server_repeats(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told = failing(status, api_key_env="TINY_KEY", max_retries=1)
    assert f"{status}: bad key: Bearer [key]" in told
    assert SECRET not in told
    assert SECRET not in caplog.text


def test_a_key_is_not_printed_pickled_or_saved() -> None:
    key = Key.of("TINY_KEY")
    assert key.reveal() == SECRET
    assert SECRET not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)
    policy = load_policy("openai", "m", urls=["http://a/v1"], api_key_env="TINY_KEY")
    assert SECRET not in json.dumps(policy_state(policy))
    assert copy.deepcopy(policy) is policy


def test_a_saved_dspy_program_holds_no_key(tmp_path: Path) -> None:
    import dspy

    from leret.policies.dspy_lm import policy_lm

    predict = dspy.Predict("question -> query")
    for urls in (("http://a/v1",), ("http://a/v1", "http://b/v1")):
        predict.lm = policy_lm(PolicySettings(kind="openai", model="m", urls=urls, api_key_env="TINY_KEY"))
        predict.save(str(tmp_path / "program.json"))
        assert SECRET not in (tmp_path / "program.json").read_text()


@pytest.mark.parametrize("value", ["tgp_v1_AbCdEf0123456789", "sk-live-0123456789", "my key"])
def test_a_recipe_that_holds_the_key_itself_is_refused_without_repeating_it(tmp_path: Path, value: str) -> None:
    recipe = tmp_path / "r.yaml"
    policy = {"kind": "openai", "model": "m", "urls": ["http://a/v1"], "api_key_env": value}
    data = {"kind": "world"}
    recipe.write_text(yaml.dump({"data": data, "policy": policy}))
    with pytest.raises(ConfigError, match=r"r\.yaml:\d+: policy\.api_key_env: names an environment variable") as caught:
        load_recipe(recipe, SamplingRecipe)
    assert value not in str(caught.value)


@pytest.mark.parametrize("url", ["http://user:sk-secret@a/v1", "http://a/v1?key=sk-secret"])
def test_a_url_that_holds_a_key_is_refused_without_repeating_it(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="a base URL holds no user, password or query") as caught:
        load_policy("openai", "m", urls=[url])
    assert "sk-secret" not in str(caught.value)


def test_a_variable_that_no_header_can_carry_is_said_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-first\nsk-second")
    with pytest.raises(PolicyError, match="line breaks") as caught:
        Key.of("TINY_KEY")
    assert "sk-" not in str(caught.value)


class Chat(Served):
    """Refuses every second request for a sample with the key in its words; answers the others."""

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] > 1:  # else it is a probe
            self.headers.append(dict(request.headers))
        if len(self.headers) % 2:
            return web.json_response({"error": {"message": f"no {request.headers['Authorization']}"}}, status=400)
        choice = {"index": 0, "message": {"content": f"city {body['seed']}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})


def test_a_run_keeps_no_key_in_its_manifest_its_events_or_its_store_and_the_command_prints_none(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    recipe = {
        "data": {"kind": "world", "limit": 4, "options": {}},
        "program": {"path": "pipelines/multihop.py:MultiHop", "adapter": {"kind": "compact"}},
        "policy": {"kind": "openai", "model": "m", "api_key_env": "TINY_KEY", "retry_for_s": 0},
        "sampling": {"prompts": 1, "samples": 2, "max_error_rate": 1.0},
    }

    async def main() -> str:
        async with serving(Chat(), under="/v1") as urls:
            recipe["policy"]["urls"] = urls
            (tmp_path / "r.yaml").write_text(yaml.dump(recipe))
            command = ["--debug", "sample", str(tmp_path / "r.yaml"), "--run", str(run)]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            return result.output + (result.stderr or "")

    told = asyncio.run(main())
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert any(path.name == "rollouts.db" for path in kept), told
    assert any(b"[key]" in content for content in kept.values()), "no refusal was stored, so this proves nothing"
    assert [path for path, content in kept.items() if SECRET.encode() in content] == []
    assert SECRET not in told
