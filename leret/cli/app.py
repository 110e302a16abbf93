"""The application: its commands and global flags, the process it runs in, and how it ends: exit codes 0, 1, 2, 130."""

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
from leret.cli import data, demo, index, rewards, run, sample, search, serve
from leret.cli.console import as_json, complain
from leret.core.errors import ConfigError, LeretError, MissingDependency
from leret.core.memory import tune_malloc
from leret.core.progress import plain

_OF_TRAINING = {"accelerate", "datasets", "peft", "safetensors", "tokenizers", "torch", "transformers", "trl"}
_DEFAULTS = {
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch its price list on import
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Of the last 1,024 shapes of bfloat16 PyTorch keeps kernels and buffers: some gigabytes, where no two are equal."""
_LOUD = ("LiteLLM", "accelerate", "bm25s", "datasets", "dspy", "httpx", "matplotlib", "numba", "transformers", "trl")


class _Application(typer.core.TyperGroup):
    """The root command: every error of a command ends here, as one message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``--debug`` is taken wherever it stands."""
        debug = "--debug" in args
        with ended(debug=debug):
            return super().parse_args(ctx, ["--debug"] * debug + [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see `ended`."""
        with ended(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Application,
    name="leret",
    help="Teach a DSPy program to search by trying: sample, train on what worked, measure, load it back.",
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
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what libraries log.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    prepare(debug)
    as_json(False)


_START, _LOOP, _DATA, _SERVING = "Start here", "Loop", "Data and retrieval", "Serving"

for panel, name, function, example in (
    (_START, "demo", demo.demo, "--run runs/demo"),
    (_START, "init", demo.init, "--questions questions.jsonl --corpus corpus.jsonl"),
    (_LOOP, "sample", sample.sample, "sampling/demo.yaml --run runs/mine --set data.limit=100"),
    (_LOOP, "pairs", sample.pairs, "--run runs/mine --strategy best-worst"),
    (_LOOP, "rescore", rewards.rescore, "--run runs/mine --reward recall@5"),
    (_LOOP, "train", run.train, "demo-sft --run runs/mine --set num_train_epochs=2"),
    (_LOOP, "merge", run.merge, "runs/mine/policies/ipo --out policies/merged"),
    (_LOOP, "eval", run.evaluate, "demo --run runs/mine --set limit=100"),
    (_LOOP, "answer", run.answer, "runs/mine/eval --policy models/reader"),
    (_LOOP, "run", run.run, "demo demo-sft demo-ipo demo --run runs/mine --rounds 2"),
    (_LOOP, "pretrain", demo.pretrain, "sample.yaml"),
    (_DATA, "search", search.search, 'indexes/mine "director of Ed Wood" -k 5'),
    (_DATA, "eval-retriever", search.eval_retriever, "indexes/mine --questions q.jsonl"),
):
    app.command(name, rich_help_panel=panel, epilog=f"Example: leret {name} {example}")(function)
for panel, name, group in (
    (_START, "recipes", demo.app),
    (_LOOP, "store", sample.app),
    (_LOOP, "rewards", rewards.app),
    (_DATA, "data", data.app),
    (_DATA, "index", index.app),
    (_SERVING, "serve", serve.app),
):
    app.add_typer(group, name=name, rich_help_panel=panel)


@contextmanager
def ended(*, debug: bool) -> Iterator[None]:
    """What a command raises becomes a message and an exit code: 1 for a failure nobody foresaw, 130 after Ctrl-C."""
    try:
        yield
    except LeretError as error:
        _trace(debug)
        complain(_words(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _trace(debug)
        complain("stopped; what was done is kept, and the same command goes on from there")
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # `leret recipes list | head`
            raise
        _trace(debug)
        complain(_of_system(error))
        raise typer.Exit(1) from None
    except Exception as error:
        if type(error).__module__.startswith(("typer", "click")):
            if isinstance(error, RuntimeError):
                raise  # typer.Exit and typer.Abort, which are its own way to end
            if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command, which has printed its help
                raise typer.Exit(0) from None
            usage: Any = error
            command, message = usage.ctx.command_path if usage.ctx else "leret", usage.format_message().rstrip(".")
            complain(f"{command}: {message[:1].lower()}{message[1:]}; `{command} --help` tells what it takes")
            raise typer.Exit(2) from None
        _trace(debug)
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in _OF_TRAINING:
            complain(f"{MissingDependency(package, 'train')}; training and a policy in this process need it")
            raise typer.Exit(2) from None
        hint = "" if debug else "; --debug shows where"
        complain(f"unexpected {type(error).__name__}: {error}. This is a fault of leret or of a library under it{hint}")
        raise typer.Exit(1) from None


def _words(error: LeretError) -> str:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} things to mend:", *(f"  {problem}" for problem in problems)])


def _of_system(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{place}the disk is full: free some space and run the same command again"
    return f"{place}{error.strerror or error}"


def _trace(debug: bool) -> None:
    if debug:
        complain(traceback.format_exc().rstrip(), label="")


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))  # a warning may quote a server


def prepare(debug: bool) -> None:
    """Set up the process; what the environment already says is left alone. Libraries log and warn under debug alone."""
    tune_malloc()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())
    for name, value in _DEFAULTS.items():
        if not debug or name.startswith("LITELLM"):
            os.environ.setdefault(name, value)
    for name in _SHAPES:
        os.environ.setdefault(name, "64")
    if "DSPY_CACHEDIR" not in os.environ:
        # DSPy opens a cache as soon as it is asked for one; leret samples without, so it gets a place that goes away.
        os.environ["DSPY_CACHEDIR"] = directory = tempfile.mkdtemp(prefix="leret-dspy-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if not debug:
        warnings.simplefilter("ignore")
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.ERROR)
