"""The command-line application: commands, global flags, process setup, and exit codes (0, 1, 2, 130)."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

import leret
from leret.cli import data, demo, index, run, sample, search, serve, view
from leret.cli.console import as_json, complain
from leret.core.errors import ConfigError, LeretError, MissingDependency, was_interrupted
from leret.core.memory import tune_malloc
from leret.core.progress import visible

_OF_TRAINING = {
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
}
_DEFAULTS = {
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads its price list on import
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Variables that limit PyTorch's caches for bfloat16 shapes. The default, 1,024 shapes, can take gigabytes."""
_LOUD = (
    "LiteLLM",
    "accelerate",
    "bm25s",
    "datasets",
    "dspy",
    "httpx",
    "numba",
    "transformers",
    "trl",
)


_GLOBAL = ("--debug", "--json")
"""Flags that may stand anywhere on the command line."""
_WITHOUT_JSON = ("serve", "view")


class _Application(typer.core.TyperGroup):
    """Root command that turns each error into one message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the flags in `_GLOBAL` to the front; words after ``--`` are not flags."""
        end = args.index("--") if "--" in args else len(args)
        flags = [flag for flag in _GLOBAL if flag in args[:end]]
        rest = [arg for arg in args[:end] if arg not in flags]
        with ended(debug="--debug" in flags):
            return super().parse_args(ctx, [*flags, *rest, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        with ended(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Application,
    name="leret",
    help="Teach a DSPy program to search by trial and error: sample, train on what worked, evaluate, load the policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leret {leret.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and library logs.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if json and context.invoked_subcommand in _WITHOUT_JSON:
        context.fail(f"`leret {context.invoked_subcommand}` prints no JSON; remove --json")
    prepare(debug)
    as_json(json)


_START = "Start here"
_LOOP = "Loop"
_DATA = "Data and retrieval"
_SERVING = "Serving"

for panel, name, function, example in (
    (_START, "demo", demo.demo, "--run runs/demo"),
    (_START, "init", demo.init, "--questions questions.jsonl --corpus corpus.jsonl"),
    (_LOOP, "sample", sample.sample, "sampling/demo.yaml --run runs/mine --set data.limit=100"),
    (_LOOP, "rescore", sample.rescore, "--run runs/mine --reward recall@5"),
    (_LOOP, "replay", sample.replay, "runs/mine --random 200"),
    (_LOOP, "train", run.train, "demo-sft --run runs/mine --set num_train_epochs=2"),
    (_LOOP, "merge", run.merge, "runs/mine/policies/ipo --out policies/merged"),
    (_LOOP, "eval", run.evaluate, "demo --run runs/mine --set limit=100"),
    (_LOOP, "view", view.view, "runs/mine"),
    (_LOOP, "compare", view.compare, "runs/seed-0 runs/seed-1 runs/seed-2"),
    (_LOOP, "run", run.run, "demo demo-sft demo-ipo demo --run runs/mine --rounds 2"),
    (_DATA, "search", search.search, 'indexes/mine "director of Ed Wood" -k 5'),
):
    app.command(name, rich_help_panel=panel, epilog=f"Example: leret {name} {example}")(function)
for panel, name, group in (
    (_START, "recipes", demo.app),
    (_LOOP, "store", sample.app),
    (_DATA, "data", data.app),
    (_DATA, "index", index.app),
    (_SERVING, "serve", serve.app),
):
    app.add_typer(group, name=name, rich_help_panel=panel)


@contextmanager
def ended(*, debug: bool) -> Iterator[None]:
    """Turn exceptions into a message and an exit code: 1 for an unexpected failure, 130 after Ctrl-C."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:  # `leret recipes list | head`
            raise
        is_usage = type(error).__module__.startswith(("typer", "click"))
        if is_usage and isinstance(error, RuntimeError):
            raise  # typer.Exit and typer.Abort
        # a group without a command printed its help
        if type(error).__name__ == "NoArgsIsHelpError":
            raise typer.Exit(0) from None
        if debug and not is_usage:
            complain(traceback.format_exc().rstrip(), label="")
        message, code = _outcome(error, debug)
        label = "" if isinstance(error, KeyboardInterrupt) else "error: "
        # All processes of a training find the same fault.
        if code != 2 or os.environ.get("RANK", "0") == "0":
            complain(message, label)
        raise typer.Exit(code) from None


def _outcome(error: Any, debug: bool) -> tuple[str, int]:
    """Return the message and exit code for an exception; ``format_message`` identifies a usage error from Typer."""
    if hasattr(error, "format_message"):
        command = error.ctx.command_path if error.ctx else "leret"
        message = error.format_message().rstrip(".")
        return f"{command}: {message[:1].lower()}{message[1:]}; see `{command} --help`", 2
    if isinstance(error, LeretError):
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        if len(problems) == 1:
            return problems[0], error.exit_code
        lines = [f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)]
        return "\n".join(lines), error.exit_code
    if was_interrupted(error):
        return "stopped; run the same command to continue", 130
    if isinstance(error, OSError):
        fault = error.strerror or error
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            fault = "the disk is full; free some space and run the same command again"
        if error.filename:
            fault = f"{error.filename}: {fault}"
        return str(fault), 1
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        if package in _OF_TRAINING:
            missing = MissingDependency(package, "train")
            return f"{missing}; it is required for training and local policies", 2
    hint = "" if debug else "; run with --debug to see the traceback"
    fault = f"unexpected {type(error).__name__}: {error}"
    return f"{fault}. This is a bug in leret or one of its dependencies{hint}", 1


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return str(visible(super().format(record)))  # warnings may quote untrusted server text


def prepare(debug: bool) -> None:
    """Set up the process; existing environment variables stay. Silence library logs and warnings unless ``debug``."""
    tune_malloc()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())
    for name, value in _DEFAULTS.items():
        if not debug or name.startswith("LITELLM"):
            os.environ.setdefault(name, value)
    for name in _SHAPES:
        os.environ.setdefault(name, "64")
    if "DSPY_CACHEDIR" not in os.environ:
        # DSPy creates a disk cache on import. leret does not use the cache, so put it in a temporary directory.
        directory = tempfile.mkdtemp(prefix="leret-dspy-")
        os.environ["DSPY_CACHEDIR"] = directory
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if not debug:
        warnings.simplefilter("ignore")
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.ERROR)
