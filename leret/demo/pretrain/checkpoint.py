"""What a pretraining run leaves so that it can go on exactly where it stopped: safetensors and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from leret.core.errors import TrainingError

_FILE = "state.safetensors"
_DONE = "finished.json"


def save(
    out: Path,
    model: PreTrainedModel,
    parts: Sequence[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    step: int,
) -> None:
    """Write weights, optimizer states and the random state in one file, whole or not at all, and the model itself."""
    tensors = {f"model/{name}": value.detach().contiguous() for name, value in _parameters(model).items()}
    for i, part in enumerate(parts):
        for name, value in _state_tensors(part).items():
            tensors[f"optimizer/{i}/{name}"] = value
    tensors["random"] = torch.get_rng_state()
    partial = out / f"{_FILE}.part"
    save_file(tensors, partial, metadata={"step": str(step), "settings": json.dumps(settings, sort_keys=True)})
    os.replace(partial, out / _FILE)
    model.save_pretrained(out)


def load(out: Path, model: PreTrainedModel, parts: Sequence[torch.optim.Optimizer], settings: Mapping[str, Any]) -> int:
    """Put a checkpoint into the model and the optimizers, if there is one.

    Returns:
        Steps done so far; 0 without a checkpoint.

    Raises:
        TrainingError: the checkpoint was made with other settings.
    """
    path = out / _FILE
    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    before = json.loads(facts["settings"])
    changed = sorted(k for k in {*before, *settings} if before.get(k) != settings.get(k))
    if changed:
        raise TrainingError(
            f"{out} holds pretraining with other settings ({', '.join(changed)}); "
            f"give the old ones to go on, or another directory to start anew"
        )
    tensors = load_file(path)
    with torch.no_grad():
        for name, value in _parameters(model).items():
            value.copy_(tensors[f"model/{name}"])
    for i, part in enumerate(parts):
        _restore(part, {k.split("/", 2)[2]: v for k, v in tensors.items() if k.startswith(f"optimizer/{i}/")})
    torch.set_rng_state(tensors["random"])
    return int(facts["step"])


def finished(out: Path, steps: int) -> bool:
    """Whether a directory holds the policy after its last step.

    Raises:
        TrainingError: it was finished after fewer steps, and cannot go on.
    """
    done = out / _DONE
    if not done.is_file():
        return False
    before = int(json.loads(done.read_text(encoding="utf-8"))["steps"])
    if before < steps:
        raise TrainingError(
            f"{out} holds a policy that was finished after {before} steps, and what it takes to go on to {steps} is "
            "gone; name another directory"
        )
    return True


def finish(out: Path, steps: int) -> None:
    """Drop the optimizer states and note that the run is complete."""
    (out / _DONE).write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")
    (out / _FILE).unlink(missing_ok=True)


def log_until(path: Path, step: int) -> list[str]:
    """Lines of a log up to a step; what was logged after the last checkpoint will be logged again."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]


def _parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once."""
    return dict(model.named_parameters())


def _state_tensors(part: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{name}": value.detach().contiguous()
        for index, entry in part.state_dict()["state"].items()
        for name, value in entry.items()
    }


def _restore(part: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = value
    part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})
