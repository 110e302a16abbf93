import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from aiohttp import web

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.core.runs import Run
from leret.policies.local.policy import LocalPolicy
from leret.policies.serving.model import ServedModel, refresh, resolve_policy, write_merged
from tests.http.servers import serving
from tests.policies.conftest import ask, set_config
from tests.policies.servers import ChatServer, refusal
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_policy(folder / "base")
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(folder / "tuned")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "tuned")
    return folder / "tuned"


@pytest.fixture
def copy(adapter, tmp_path):
    return Path(shutil.copytree(adapter, tmp_path / "tuned"))


def test_full_weights_are_named_by_directory_and_digest(llama_dir, tmp_path):
    served, other = resolve_policy(str(llama_dir)), resolve_policy(str(tiny_policy(tmp_path / "tiny-llama", seed=1)))
    assert (served.weights, served.adapter) == (str(llama_dir), None)
    assert [one.name.startswith("tiny-llama-") for one in (served, other)] == [True, True]
    assert other.name != served.name
    assert resolve_policy(str(llama_dir), name="mine").name == "mine"
    shipped = resolve_policy("demo")
    assert shipped.name.startswith("demo-")
    assert Path(shipped.weights).is_dir()
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


def test_an_adapter_is_served_on_its_base_and_refused_without_it(adapter, copy):
    served = resolve_policy(str(adapter))
    assert served.weights == str(adapter.parent / "base")
    assert (served.adapter, served.tokenizer, served.rank) == (adapter, adapter, 4)
    for base, says in (("/no/such/base", "model directory"), (None, "does not set base_model_name_or_path")):
        set_config(copy, "adapter_config.json", base_model_name_or_path=base)
        with pytest.raises(PolicyError, match=says):
            resolve_policy(str(copy))


def test_an_adapter_equals_peft_as_it_is_and_merged(adapter, tmp_path):
    from peft import AutoPeftModelForCausalLM

    write_merged(adapter, tmp_path / "merged")
    oracle = AutoPeftModelForCausalLM.from_pretrained(adapter)
    texts = []
    for path in (adapter, tmp_path / "merged", adapter.parent / "base"):
        policy = LocalPolicy(LocalPolicySettings(model=str(path)))
        [[one]] = policy.complete_many([ask("the city", 1)])
        policy.close()
        texts.append(one.text)
        ids = torch.tensor([[3, *policy.model.tokenizer.convert_tokens_to_ids(["the", "city"]), 4, *one.token_ids]])
        with torch.no_grad():
            wanted = oracle(ids).logits.log_softmax(dim=-1)[0, 3:-1].gather(1, ids[0, 4:, None])[:, 0]
        assert (one.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)) is (path != adapter.parent / "base")
    assert texts[0] == texts[1] != texts[2]


ADAPTER = ServedModel("ipo-0123abcd", "/models/base", Path("/run/policies/ipo"), rank=8)


class Vllm(ChatServer):
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
        (ServedModel("ipo-0123abcd", "/run/policies/ipo"), "only when it starts", ["/v1/models"]),
    ],
    ids=["adapter", "weights"],
)
def test_a_server_without_the_policy_is_refused(served, why, asked):
    server = Vllm(models=("base",), updates=False)
    with pytest.raises(PolicyError, match=f"it serves base; .*{why}.*leret serve policy /run/policies/ipo"):
        refreshed(server, served=served)
    assert server.paths == asked
