"""Models for inference servers: full weights or an adapter.

Their names include a digest of the weights.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from leret.config.policy import OpenAIPolicySettings
from leret.core.bundled import POLICIES
from leret.core.errors import ConfigError, PolicyError
from leret.core.files import atomic_directory
from leret.core.runs import Run
from leret.http.client import Call, HttpError
from leret.policies.checkpoints import (
    HUB_NAME,
    adapter_base,
    find_model,
    load_tokenizer,
    model_digest,
    read_model_json,
    sampled_model,
)
from leret.policies.load import PROBE_S
from leret.policies.local.model import load_weights
from leret.policies.remote.openai import OpenAIPolicy

_FIT_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")
_PROBE = "Which river flows through the city where the author of the book was born?"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model for an inference server.

    Unless the user chose it, ``name`` includes a digest of the weights, so that different weights
    have different names.
    """

    name: str
    weights: str  # absolute path, or hub repository, of the model or the adapter's base
    adapter: Path | None = None  # directory of a LoRA adapter
    tokenizer: Path | None = None  # directory of the adapter's; None for the base model's
    rank: int = 0  # maximum rank of the adapter's matrices; 0 for full weights


def resolve_policy(policy: str, run: Run | None = None, name: str | None = None) -> ServedModel:
    """Return the model to serve.

    ``policy`` is a shipped policy, a directory, a hub repository, or (with ``run``) a run's policy.
    ``base`` is the model that the run was sampled from. The default name has the directory's name
    and a digest.
    """
    if name is not None and not _FIT_NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r} is invalid; use only letters, digits, and the characters - _ . /"
        )
    stem, model = (policy, _of_run(policy, run)) if run is not None else _resolve(policy)
    if model not in POLICIES and not Path(model).is_dir():
        return ServedModel(name or model, model)
    path = find_model(model).resolve()
    name = name or f"{stem}-{model_digest(path)[:8]}"
    base = adapter_base(path)
    if base is None:
        return ServedModel(name, str(path))
    has_tokenizer = any(
        (path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")
    )
    config = read_model_json(path / "adapter_config.json")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    rank = max((rank for rank in ranks if isinstance(rank, int)), default=16)
    return ServedModel(name, str(base.resolve()), path, path if has_tokenizer else None, rank)


def write_merged(adapter: Path, out: Path) -> float:
    """Merge an adapter into its base in float32, and write the model to the directory ``out``.

    Returns:
        The maximum difference between logits before and after merging on a short text, divided by
        the maximum logit.

    Raises:
        PolicyError: ``adapter`` is not an adapter, does not fit its base, or changes the logits
            when merged (by more than 1e-4); or ``out`` cannot be written.
    """
    import torch
    from peft import PeftModel

    base = adapter_base(adapter)
    tokenizer = load_tokenizer(adapter)
    if base is None:
        raise PolicyError(f"{adapter} is not an adapter but a full model; serve it without merging")
    ids = tokenizer(_PROBE, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model = PeftModel.from_pretrained(load_weights(base, "float32"), str(adapter)).eval()
        before = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        difference = float((merged(input_ids=ids).logits - before).abs().max() / before.abs().max())
    if not difference <= 1e-4:
        raise PolicyError(
            f"merging {adapter} into {base} changes the logits by {difference:.1e} of the maximum "
            "logit; serve the adapter without merging"
        )
    busy = PolicyError(f"another process is writing {out}; try again later")
    try:
        with atomic_directory(out, model_digest(adapter), busy) as place:
            merged.save_pretrained(place)
            tokenizer.save_pretrained(place)
    except OSError as error:
        raise PolicyError(
            f"cannot write {out} ({error.strerror or error}); free disk space for the full "
            "weights, or serve the adapter without merging"
        ).failed() from error
    return difference


def _resolve(policy: str) -> tuple[str, str]:
    if policy in POLICIES:
        return policy, policy
    path = Path(policy)
    if (path / "run.yaml").is_file():
        raise PolicyError(
            f"{policy} is a run, not a policy; choose a policy of the run: {_known(Run(path))}"
        )
    if path.is_dir():
        return path.resolve().name, policy
    if not HUB_NAME.fullmatch(policy) or len(path.parts) != 2 or path.parent.is_dir():
        raise PolicyError(
            f"policy {policy} does not exist; give a model directory, `demo`, `agent`, a Hugging "
            "Face repository, or, with --run R, the name of a policy in the run R"
        )
    return policy, policy


def _of_run(policy: str, run: Run) -> str:
    if policy == "base":
        return sampled_model(run)
    path = run.policies / policy
    if not path.is_dir():
        raise PolicyError(f"{run.path} has no policy {policy!r}; available: {_known(run)}")
    return str(path)


def _known(run: Run) -> str:
    trained = sorted(path.parent.name for path in run.policies.glob("[!.]*/training.json"))
    return f"--run {run.path} with " + ", ".join(["base", *trained])


def refresh(
    settings: OpenAIPolicySettings, served: ServedModel, directory: str
) -> OpenAIPolicySettings:
    """Return ``settings`` with the name of the policy ``served``.

    Raise PolicyError if a server does not have it.

    A server has the policy if it lists the policy's name, or if it can load its adapter from the
    same path (vLLM can with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``).
    ``directory`` is for the error message.
    """
    refreshed = settings.model_copy(update={"model": served.name})
    asyncio.run(_check_all(refreshed, served, directory))
    return refreshed


async def _check_all(settings: OpenAIPolicySettings, served: ServedModel, directory: str) -> None:
    for url in settings.urls:
        server = settings.model_copy(update={"urls": (url,), "retry_for_s": PROBE_S})
        async with aclosing(OpenAIPolicy(server)) as policy:
            names = await policy.served()
            why = "a server loads full weights only when it starts"
            if served.name not in names and served.adapter is not None:
                why = await _load_adapter(policy, served)
                names = await policy.served()
        if served.name not in names:
            raise PolicyError(
                f"{url} does not serve {served.name}, the policy of the next round (it serves "
                f"{', '.join(names) or 'no model'}; {why}); replace the server with "
                f"`leret serve policy {directory}`, and run the same command again to continue"
            )


async def _load_adapter(policy: OpenAIPolicy, served: ServedModel) -> str:
    """Ask a server to load an adapter; return its answer as text for an error message."""
    call = Call(
        "POST",
        "/load_lora_adapter",
        json={"lora_name": served.name, "lora_path": str(served.adapter)},
    )
    try:
        return await policy.client.request(call, lambda answer: f"it answered {answer.text!r}")
    except HttpError as error:
        return f"to load adapters, start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: {error}"
