"""Which weights a name means, and adapters: served on their base, or merged into it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from leret.core.errors import ConfigError, PolicyError
from leret.core.runs import Run
from leret.policies.local.policy import LocalPolicy
from leret.policies.serving.model import merge_adapter, merged_directory, resolve_policy
from tests.policies.conftest import ask
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with weights that matter, saved as leret's trainings save theirs."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_policy(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    get_peft_model(model, lora).save_pretrained(folder / "tuned")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "tuned")
    return folder / "tuned"


@pytest.fixture
def run(tmp_path: Path, llama_dir: Path) -> Run:
    made = Run.create(tmp_path / "run")
    made.update(sampling={"policy": {"kind": "local", "model": str(llama_dir)}})
    (made.policies / "ipo").mkdir(parents=True)
    shutil.copytree(llama_dir, made.policies / "ipo", dirs_exist_ok=True)
    (made.policies / "ipo" / "training.json").write_text("{}")
    return made


def test_full_weights_are_named_by_their_directory_and_their_digest(llama_dir: Path, tmp_path: Path) -> None:
    served = resolve_policy(str(llama_dir))
    assert served.name.startswith("tiny-llama-")
    assert (served.weights, served.adapter) == (str(llama_dir), None)
    other = resolve_policy(str(tiny_policy(tmp_path / "tiny-llama", seed=1)))
    assert other.name.startswith("tiny-llama-")
    assert other.name != served.name
    assert resolve_policy(str(llama_dir), name="mine").name == "mine"
    hub = resolve_policy("owner/model")  # left to the engine
    assert (hub.name, hub.weights) == ("owner/model", "owner/model")


def test_the_policies_of_a_run_and_its_base(run: Run, llama_dir: Path) -> None:
    assert resolve_policy("base", run).weights == str(llama_dir)
    assert resolve_policy("ipo", run).weights == str((run.policies / "ipo").resolve())
    assert resolve_policy(str(run.policies / "ipo")) == resolve_policy("ipo", run)
    with pytest.raises(PolicyError, match=r"no policy 'dpo'; it has --run .* with base, ipo"):
        resolve_policy("dpo", run)
    with pytest.raises(PolicyError, match="is a run, not a policy; name one of its policies"):
        resolve_policy(str(run.path))
    run.update(sampling={"policy": {"kind": "openai", "model": "llama-8b"}})
    with pytest.raises(PolicyError, match="was sampled from 'llama-8b' on a server"):
        resolve_policy("base", run)


def test_a_name_that_a_server_could_not_take_is_refused(llama_dir: Path) -> None:
    for name in ("a b", "a=b", "a:b", "", "/a"):
        with pytest.raises(ConfigError, match="--name"):
            resolve_policy(str(llama_dir), name=name)


def test_an_adapter_is_served_on_its_base_and_refused_without_it(adapter: Path, tmp_path: Path) -> None:
    served = resolve_policy(str(adapter))
    assert served.weights == str(adapter.parent / "base")
    assert (served.adapter, served.tokenizer, served.rank) == (adapter, adapter, 4)
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    for base, says in (("/no/such/base", "no model directory"), (None, "names no base_model_name_or_path")):
        (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(PolicyError, match=says):
            resolve_policy(str(moved))


def test_merged_weights_say_what_the_adapter_says(adapter: Path) -> None:
    served = merge_adapter(resolve_policy(str(adapter)))
    assert served.adapter is None
    assert served.weights == str(merged_directory(adapter))
    assert served.name == resolve_policy(str(adapter)).name

    async def completions(path: str | Path) -> list[tuple[str, tuple[float, ...]]]:
        policy = LocalPolicy(path, threads=1)
        try:
            found = await policy.complete(ask("the city of london", 1, 2, 3))
        finally:
            policy.close()
        return [(completion.text, completion.logprobs) for completion in found]

    tuned, whole, base = (asyncio.run(completions(p)) for p in (adapter, served.weights, adapter.parent / "base"))
    assert [text for text, _ in whole] == [text for text, _ in tuned]
    for (_, got), (_, wanted) in zip(whole, tuned, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
    assert [text for text, _ in base] != [text for text, _ in tuned]


def test_merging_is_done_once_until_the_adapter_changes(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "tuned"
    shutil.copytree(adapter, copy)
    target = Path(merge_adapter(resolve_policy(str(copy))).weights)
    before = (target / "model.safetensors").stat().st_mtime_ns
    merge_adapter(resolve_policy(str(copy)))
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    merge_adapter(resolve_policy(str(copy)))
    assert (target / "model.safetensors").stat().st_mtime_ns != before
    assert [path.name for path in tmp_path.glob(".tuned-merged*")] == [".tuned-merged"]  # nothing half-done is left
    shutil.rmtree(target)

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leret.policies.serving.model.atomic_directory", full)
    with pytest.raises(PolicyError, match="No space left on device"):
        merge_adapter(resolve_policy(str(copy)))
