import asyncio
import shutil
from pathlib import Path

import pytest
from aiohttp import web

from leret.config.policy import OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.core.runs import Run
from leret.policies.checkpoints import load_tokenizer
from leret.policies.serving.model import ServedModel, refresh, resolve_policy
from tests.http.servers import serving
from tests.policies.conftest import set_config
from tests.policies.servers import ChatServer
from tests.tiny import tiny_policy


def test_full_weights_are_named_by_directory_and_digest(llama_dir, tmp_path):
    served, other = resolve_policy(str(llama_dir)), resolve_policy(str(tiny_policy(tmp_path / "tiny-llama", seed=1)))
    assert (served.weights, served.adapter) == (str(llama_dir), None)
    assert [one.name.startswith("tiny-llama-") for one in (served, other)] == [True, True]
    assert other.name != served.name
    assert resolve_policy(str(llama_dir), name="mine").name == "mine"
    hub = resolve_policy("owner/model")  # left to the engine
    assert (hub.name, hub.weights) == ("owner/model", "owner/model")


def test_the_policies_of_a_run_and_its_base(llama_dir, tmp_path):
    run = Run.create(tmp_path / "run")
    run.update(sampling={"policy": {"kind": "local", "model": str(llama_dir)}})
    shutil.copytree(llama_dir, run.policies / "ipo")
    (run.policies / "ipo" / "training.json").write_text("{}")
    assert resolve_policy("base", run).weights == str(llama_dir)
    assert resolve_policy("ipo", run).weights == str((run.policies / "ipo").resolve())
    assert resolve_policy(str(run.policies / "ipo")) == resolve_policy("ipo", run)
    with pytest.raises(PolicyError, match=r"no policy 'dpo'; available: --run .* with base, ipo"):
        resolve_policy("dpo", run)
    with pytest.raises(PolicyError, match="is a run, not a policy; choose a policy of the run"):
        resolve_policy(str(run.path))
    run.update(sampling={"policy": {"kind": "openai", "model": "llama-8b"}})
    with pytest.raises(PolicyError, match="was sampled from 'llama-8b' on a server"):
        resolve_policy("base", run)


def test_an_adapter_is_served_on_its_base_and_refused_without_it(llama_dir, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = tmp_path / "tuned"
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(llama_dir), lora).save_pretrained(adapter)
    load_tokenizer(llama_dir).save_pretrained(adapter)
    served = resolve_policy(str(adapter))
    assert served.weights == str(llama_dir)
    assert (served.adapter, served.tokenizer, served.rank) == (adapter, adapter, 4)
    for base, says in (("/no/such/base", "model directory"), (None, "does not set base_model_name_or_path")):
        set_config(adapter, "adapter_config.json", base_model_name_or_path=base)
        with pytest.raises(PolicyError, match=says):
            resolve_policy(str(adapter))


ADAPTER = ServedModel("ipo-0123abcd", "/models/base", Path("/run/policies/ipo"), rank=8)


class Vllm(ChatServer):
    async def route(self, request, body):
        if request.path != "/v1/load_lora_adapter":
            return await super().route(request, body)
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
        (ServedModel("ipo-0123abcd", "/run/policies/ipo"), "only when it starts", ["/v1/models"]),
    ],
    ids=["adapter", "weights"],
)
def test_a_server_without_the_policy_is_refused(served, why, asked):
    server = ChatServer(models=("base",))
    with pytest.raises(PolicyError, match=f"it serves base; .*{why}.*leret serve policy /run/policies/ipo"):
        refreshed(server, served=served)
    assert server.paths == asked
