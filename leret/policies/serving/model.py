"""Served models: full weights, or an adapter on its base, under a name with a digest of the weights."""

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
from leret.core.stages import completed, mark_completed
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
    """A policy for an engine.

    ``name`` holds a digest of the weights, unless chosen by the user, so that samples of other weights are never taken
    for this policy's.
    """

    name: str
    weights: str  # of the model or of an adapter's base: an absolute path, or a repository of the hub
    adapter: Path | None = None  # directory of a LoRA adapter
    tokenizer: Path | None = None  # directory of the adapter's tokenizer; None for the base's
    rank: int = 0  # largest rank in the adapter; 0 for full weights


def resolve_policy(policy: str, run: Run | None = None, name: str | None = None) -> ServedModel:
    """Resolve ``demo``, a model or adapter directory or a hub repository; with a run, ``base`` or one of its policies.

    The default name on the server is the directory's name with a digest of the weights.
    """
    if name is not None and not _FIT_NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: use letters and digits, with - _ . / between them")
    stem, model = (policy, _of_run(policy, run)) if run is not None else _resolve(policy)
    if model not in POLICIES and not Path(model).is_dir():
        return ServedModel(name or model, model)
    path = find_model(model).resolve()
    name = name or f"{stem}-{model_digest(path)[:8]}"
    base = adapter_base(path)
    if base is None:
        return ServedModel(name, str(path))
    has_tokenizer = any((path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    config = read_model_json(path / "adapter_config.json")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    rank = max((one for one in ranks if isinstance(one, int)), default=16)
    return ServedModel(name, str(base.resolve()), path, path if has_tokenizer else None, rank)


def merged_directory(adapter: Path) -> Path:
    """Return the directory for an adapter's merged weights; hidden, so that no stage takes them for another policy."""
    return adapter.parent / f".{adapter.name}-merged"


def merge_adapter(served: ServedModel) -> ServedModel:
    """Return the policy as full weights in a directory, merged again only if adapter or base have changed."""
    assert served.adapter is not None
    target, digest = merged_directory(served.adapter), model_digest(served.adapter)
    if completed(target, "merged", digest) is None:
        config = read_model_json(Path(served.weights) / "config.json")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        write_merged(served.adapter, target, dtype)
    return ServedModel(served.name, str(target))


def write_merged(adapter: Path, out: Path, dtype: str = "float32") -> float:
    """Write an adapter merged into its base as a model directory.

    Returns:
        The largest difference between their logits on a short text, as a fraction of the largest logit.

    Raises:
        PolicyError: ``adapter`` is not an adapter, does not fit its base, or merges to another model (a difference
            above 1e-4 in float32, or above 5e-2), and nothing is written; or there is no room.
    """
    import torch
    from peft import PeftModel

    base, tokenizer = adapter_base(adapter), load_tokenizer(adapter)
    if base is None:
        raise PolicyError(f"{adapter} holds full weights, not an adapter; use it as it is")
    ids = tokenizer(_PROBE, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model = PeftModel.from_pretrained(load_weights(base, dtype), str(adapter)).eval()
        before = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        difference = float((merged(input_ids=ids).logits - before).abs().max() / before.abs().max())
    if not difference <= (1e-4 if dtype == "float32" else 5e-2):
        raise PolicyError(
            f"{adapter} merged into {base} gives logits that differ by {difference:.1e} of the largest: the adapter "
            "does not merge exactly; serve it as an adapter"
        )
    digest = model_digest(adapter)
    try:
        with atomic_directory(out, digest, PolicyError(f"another process is writing {out}")) as place:
            merged.save_pretrained(place)
            tokenizer.save_pretrained(place)
            mark_completed(place, "merged", digest, {})
    except OSError as error:
        raise PolicyError(
            f"{out} cannot be written ({error.strerror or error}); merging needs room for full weights: free some, or "
            "serve the adapter as it is"
        ).failed() from error
    return difference


def _resolve(policy: str) -> tuple[str, str]:
    if policy in POLICIES:
        return policy, policy
    path = Path(policy)
    if (path / "run.yaml").is_file():
        raise PolicyError(f"{policy} is a run, not a policy; name one of its policies: {_known(Run(path))}")
    if path.is_dir():
        return path.resolve().name, policy
    if not HUB_NAME.fullmatch(policy) or len(path.parts) != 2 or path.parent.is_dir():
        raise PolicyError(
            f"there is no policy {policy}; give a model directory, `demo`, `agent`, a repository of the hub, "
            "or a policy of a run with --run R"
        )
    return policy, policy


def _of_run(policy: str, run: Run) -> str:
    if policy == "base":
        return sampled_model(run)
    path = run.policies / policy
    if not path.is_dir():
        raise PolicyError(f"{run.path} has no policy {policy!r}; it has {_known(run)}")
    return str(path)


def _known(run: Run) -> str:
    trained = sorted(path.parent.name for path in run.policies.glob("[!.]*/training.json"))
    return f"--run {run.path} with " + ", ".join(["base", *trained])


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
    call = Call("POST", "/load_lora_adapter", json={"lora_name": served.name, "lora_path": str(served.adapter)})
    try:
        return await policy.client.request(call, lambda answer: f"it answered {answer.text!r}")
    except HttpError as error:
        return f"vLLM loads adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: {error}"
