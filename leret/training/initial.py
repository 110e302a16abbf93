"""The weights that a training starts from: the sampled policy, a trained one of the run, or a directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.core.bundled import demo_policy
from leret.core.errors import PolicyError, TrainingError
from leret.core.runs import Run
from leret.policies.checkpoints import find_model, model_digest

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Initial:
    """Where a training starts.

    Attributes:
        name: as the recipe has it: ``base``, a policy of the run, or a directory.
        directory: full weights, or an adapter.
        digest: of what it computes.
        total_steps: optimizer steps behind it since the base.
    """

    name: str
    directory: Path
    digest: str
    total_steps: int


def find_initial(run: Run, init: str) -> Initial:
    """Resolve the recipe's ``init``.

    Raises:
        TrainingError: ``base`` is only known as a served model or was changed since, or there is no such policy.
        PolicyError: the directory is no model, or its weights are damaged.
        RunError: the run has not been sampled.
    """
    trained = run.policies / init
    if init == "base":
        model = _sampled_model(run)
    elif (trained / "training.json").is_file():
        model = str(trained)
    elif init == "demo":
        model = str(demo_policy())
    elif Path(init).is_dir() or _HUB_NAME.fullmatch(init):
        model = init
    else:
        known = sorted(path.parent.name for path in run.policies.glob("[!.]*/training.json"))
        raise TrainingError(
            f"init: {init!r} is not base, not a trained policy of {run.path} (it has {', '.join(known) or 'none yet'}) "
            f"and not a directory; train {init} first, or name one of these"
        )
    path = find_model(model).resolve()
    digest = model_digest(path)
    if init == "base":
        _check_unchanged(run, path, digest)
    return Initial(init, path, digest, int(trained_record(path).get("total_steps", 0)))


def trained_record(directory: Path) -> dict[str, Any]:
    """Content of a policy's training.json; empty where it has none.

    Raises:
        TrainingError: it cannot be read.
    """
    path = directory / "training.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); remove {directory} and train it again") from error


def _sampled_model(run: Run) -> str:
    policy: Mapping[str, Any] = run.section("sampling", "leret sample RECIPE").get("policy", {})
    model = str(policy.get("model", ""))
    if model == "demo":
        return str(demo_policy())
    if Path(model).is_dir():
        return model
    if policy.get("kind") == "openai":
        raise TrainingError(
            f"the run was sampled from {model!r} on a server; training needs its weights: set init to their directory, "
            "or to demo where that is the policy that was served"
        )
    if _HUB_NAME.fullmatch(model):
        return model
    raise PolicyError(f"the sampled policy {model} is no longer there; set init to the directory of its weights")


def _check_unchanged(run: Run, path: Path, digest: str) -> None:
    """The weights in the base's directory must be the ones that were sampled."""
    manifest = run.manifest()
    rounds = manifest.get("rounds") or []
    local = manifest["sampling"].get("policy", {}).get("kind") == "local"
    if local and rounds and rounds[0]["digest"] != digest:
        raise TrainingError(
            f"the policy in {path} is no longer the one that {run.path} was sampled from: its files have changed. Put "
            "the old ones back, or sample a new run with the new ones"
        )
