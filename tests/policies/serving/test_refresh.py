import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.policies.serving.model import ServedModel
from leret.policies.serving.refresh import refresh
from tests.http.servers import serving
from tests.policies.servers import ChatServer, refusal

ADAPTER = ServedModel("ipo-0123abcd", "/models/base", Path("/run/policies/ipo"), rank=8)


class Vllm(ChatServer):
    """vLLM's list of models, and adapters at run time with ``updates``."""

    updates = True

    async def route(self, request, body):
        if request.path != "/v1/load_lora_adapter":
            return await super().route(request, body)
        if not self.updates:
            return refusal("Not Found", 404)
        self.models = (*self.models, body["lora_name"])
        return web.Response(text="Success: LoRA adapter 'x' added successfully.")


def refreshed(*servers, served=ADAPTER):
    async def main():
        async with serving(*servers, under="/v1") as urls:
            settings = OpenAIPolicySettings(model="base", urls=tuple(urls), temperature=0.7)
            return await asyncio.to_thread(refresh, settings, served, "/run/policies/ipo")

    return asyncio.run(main())


def test_every_server_gets_the_adapter_once():
    has, lacks = Vllm(models=("base", "ipo-0123abcd")), Vllm(models=("base",))
    settings = refreshed(has, lacks)
    assert (settings.model, settings.temperature, settings.kind) == ("ipo-0123abcd", 0.7, "openai")
    assert has.bodies == []
    assert lacks.bodies == [{"lora_name": "ipo-0123abcd", "lora_path": "/run/policies/ipo"}]


@pytest.mark.parametrize(
    ("served", "why", "asked"),
    [
        (ADAPTER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*404", ["/v1/models", "/v1/load_lora_adapter", "/v1/models"]),
        (ServedModel("ipo-0123abcd", "/run/policies/ipo"), "taken when a server starts", ["/v1/models"]),
    ],
    ids=["adapter", "weights"],
)
def test_a_server_without_the_policy_is_refused(served, why, asked):
    server = Vllm(models=("base",), updates=False)
    with pytest.raises(PolicyError, match=f"it serves base; .*{why}.*leret serve policy /run/policies/ipo"):
        refreshed(server, served=served)
    assert server.paths == asked
