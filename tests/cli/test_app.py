"""The command line: help, exit codes, one message an error, progress, and the loop through real stages."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leret.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
ANSI = re.compile(r"\x1b\[[0-9;]*m?")
COMMANDS = [
    "", "demo", "init", "sample", "pairs", "train", "eval", "run", "pretrain", "recipes", "recipes list",
    "recipes show", "recipes copy", "data", "data inspect", "serve", "serve policy", "serve retriever",
    "eval-retriever", "index", "index build", "index info", "index check", "search", "store", "store check",
    "store export",
]  # fmt: skip
GROUPS = {"", "recipes", "data", "serve", "index", "store"}


def leret(*args: str | Path) -> tuple[int, str]:
    """Exit code and all output of a command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in GROUPS])
def test_help_ends_with_an_example_that_can_be_typed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.main import get_command

    example = leret(*command.split(), "--help")[1].rsplit("Example: ", 1)[1]
    words = shlex.split(example)
    assert words[: 1 + len(command.split())] == ["leret", *command.split()]
    found: Any = get_command(app)
    context = found.make_context("leret", words[1:])
    for _ in command.split():
        name, found, rest = found.resolve_command(context, [*context._protected_args, *context.args])
        context = found.make_context(name, rest, parent=context)  # raises where a flag or an argument does not exist


@pytest.mark.parametrize(
    "command",
    ["demo", "sample", "pairs", "train", "eval", "run", "recipes list", "data inspect", "eval-retriever", "index build",
     "index info", "search", "store check"],
)  # fmt: skip
def test_what_shows_facts_or_a_table_takes_json(command: str) -> None:
    assert "--json" in leret(*command.split(), "--help")[1]


def test_json_is_one_object_alone(tmp_path: Path) -> None:
    assert json.loads(leret("recipes", "list", "--json")[1])["training/demo-sft.yaml"].startswith("SFT of the demo")
    code, out = leret("run", "demo", "demo-sft", "demo", "--run", tmp_path / "r", "--dry-run", "--json")
    assert (code, list(json.loads(out).values())[1]) == (0, "round 1: train sft (sft) from base")


def test_help_takes_less_than_half_a_second() -> None:
    def cpu_s() -> float:  # of finished children: wall clock would judge what else the machine does
        times = os.times()
        return times.children_user + times.children_system

    def one_s() -> float:
        began = cpu_s()
        subprocess.run([sys.executable, "-m", "leret", "--help"], check=True, capture_output=True, cwd=ROOT)
        return cpu_s() - began

    assert any(one_s() < 0.5 for _ in range(10))


@pytest.mark.parametrize(
    ("args", "says"),
    [(["sample"], "leret sample: missing argument 'RECIPE'"), (["sample", "demo"], "sample: missing option '--run'"),
     (["nope"], "leret: no such command 'nope'"), (["store", "chek"], "did you mean 'check'"),
     (["--odd"], "leret: no such"), (["pairs", "--run", "R", "--strategy", "odd"], "'odd'"),
     (["run", "--run", "R"], "leret run: missing argument"), (["demo", "--seed", "x"], "'--seed'"),
     (["pairs", "--run", "R", "--max-pairs", "0"], "'--max-pairs'")]
)  # fmt: skip
def test_wrong_usage_exits_2_in_one_line(args: list[str], says: str) -> None:
    code, out = leret(*args)
    assert code == 2
    assert out.startswith("error: ")
    assert out.count("\n") == 1
    assert says in out.replace("Did", "did")


def test_a_recipe_is_shown_by_its_short_name() -> None:
    shown = (ROOT / "training" / "demo-sft.yaml").read_text(encoding="utf-8").strip()
    assert leret("recipes", "show", "demo-sft") == (0, shown + "\n")
    code, out = leret("recipes", "show", "dmo-sft")
    assert (code, "did you mean training/demo-sft.yaml?" in out, out.count("\n")) == (2, True, 1)


def test_the_traceback_is_shown_with_debug_alone(tmp_path: Path) -> None:
    for debug in ([], ["--debug"]):
        code, out = leret("pairs", "--run", tmp_path, *debug)
        assert code == 2
        assert out.count("error: ") == 1
        assert ("Traceback" in out) == bool(debug)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(ZeroDivisionError("odd"), 1, "unexpected ZeroDivisionError: odd"), (KeyboardInterrupt(), 130, "stopped; ")],
)
def test_failures_end_in_one_line(error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[str]:
        raise error

    monkeypatch.setattr("leret.core.bundled.names", fail)
    got, out = leret("recipes", "list")
    assert (got, out.count("\n")) == (code, 1)
    assert out.startswith(f"error: {says}")


SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
PREPARED = """
import json, logging, os
from leret.cli.app import prepare
prepare(False)
logging.getLogger("leret").warning("refused: %s", "a\\x1b[31mb\\u202ec")
print(json.dumps(dict(os.environ)))
"""


def prepared(**given: str) -> tuple[dict[str, str], str]:
    """Environment and standard error of a process that is set up for a command."""
    around = {name: value for name, value in os.environ.items() if name not in (*SHAPES, "DSPY_CACHEDIR")}
    made = subprocess.run(
        [sys.executable, "-c", PREPARED], env=around | given, capture_output=True, text=True, check=True
    )
    return json.loads(made.stdout), made.stderr


def test_a_command_bounds_caches_and_leaves_none_behind() -> None:
    found, told = prepared()
    assert [found[name] for name in SHAPES] == ["64", "64"]
    assert not Path(found["DSPY_CACHEDIR"]).exists()
    assert told == "refused: a [31mb c\n"  # no character of a warning is a command of the terminal


def test_a_command_leaves_what_the_user_said(tmp_path: Path) -> None:
    given = {**dict.fromkeys(SHAPES, "512"), "DSPY_CACHEDIR": str(tmp_path)}
    assert given.items() <= prepared(**given)[0].items()
    assert tmp_path.exists()
