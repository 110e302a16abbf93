"""New weights behind a served policy: loads adapters into running servers, and asks for full weights."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.http.client import Call, HttpError
from leret.policies.load import PROBE_S
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.model import ServedModel


def refresh(settings: OpenAIPolicySettings, served: ServedModel, directory: str) -> OpenAIPolicySettings:
    """Return settings for the policy in ``directory`` on the same servers, by the name of its weights.

    A server that lists the name has it. A vLLM that was started with ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` loads an adapter, from the same path.
    """
    refreshed = settings.model_copy(update={"model": served.name})
    asyncio.run(_check_all(refreshed, served, directory))
    return refreshed


async def _check_all(settings: OpenAIPolicySettings, served: ServedModel, directory: str) -> None:
    for url in settings.urls:
        one = settings.model_copy(update={"urls": (url,), "retry_for_s": PROBE_S})
        async with aclosing(OpenAIPolicy(one)) as policy:
            names = await policy.served()
            why = "weights are taken when a server starts"
            if served.name not in names and served.adapter is not None:
                why = await _load_adapter(policy, served)
                names = await policy.served()
        if served.name not in names:
            raise PolicyError(
                f"{url} does not serve {served.name}, the policy of the next round (it serves "
                f"{', '.join(names) or 'no model'}; {why}); start `leret serve policy {directory}` in its place, and "
                "run the same command again, which continues from here"
            )


async def _load_adapter(policy: OpenAIPolicy, served: ServedModel) -> str:
    """Ask a server to load an adapter; return why it may not have done so."""
    call = Call.post("/load_lora_adapter", {"lora_name": served.name, "lora_path": str(served.adapter)})
    try:
        return await policy.client.request(call, lambda answer: f"it answered {answer.text!r}")
    except HttpError as error:
        return f"vLLM loads adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: {error}"
