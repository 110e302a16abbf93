import json
import logging
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.main import get_command

from leret.__main__ import main
from leret.cli.app import app
from leret.rewards import REWARDS
from scripts.figures import surface
from tests.first_steps import leret

ROOT = Path(__file__).resolve().parents[2]
ANSI = re.compile(r"\x1b\[[0-9;]*m?")


def commands(found, way=()):
    inside = getattr(found, "commands", {})
    for name, command in inside.items():
        yield from commands(command, (*way, name))
    if not inside:
        yield way


@pytest.mark.parametrize("command", list(commands(get_command(app))), ids=" ".join)
def test_help_ends_with_an_example_that_can_be_typed(command):
    words = shlex.split(leret(*command, "--help")[1].rsplit("Example: ", 1)[1])
    assert words[: 1 + len(command)] == ["leret", *command]
    found = get_command(app)
    context = found.make_context("leret", words[1:])
    for _ in command:
        name, found, rest = found.resolve_command(context, [*context._protected_args, *context.args])
        context = found.make_context(name, rest, parent=context)  # raises where a flag or an argument does not exist


def test_the_commands_and_their_options_stay_few():
    assert surface() == {"commands": 23, "options": 98, "arguments": 18}


def test_json_is_one_object_alone(tmp_path):
    listed = json.loads(leret("recipes", "list", "--json")[1])
    assert listed["recipes"]["training/demo-sft.yaml"].startswith("SFT of the demo")
    assert set(REWARDS) <= set(listed["rewards"])
    assert json.loads(leret("--json", "recipes", "show", "demo-sft")[1])["text"].startswith("# Purpose:")
    code, out = leret("run", "demo", "demo-sft", "demo", "--run", tmp_path / "r", "--dry-run", "--json")
    assert (code, list(json.loads(out).values())[1]) == (0, "round 1: train sft (sft) from base")


@pytest.mark.parametrize(
    ("args", "says"),
    [(["sample"], "leret sample: missing argument 'RECIPE'"), (["train", "sft"], "train: missing option '--run'"),
     (["nope"], "leret: no such command 'nope'"), (["store", "chek"], "id you mean 'check'"),
     (["--odd"], "leret: no such"), (["rescore", "--run", "R", "--strategy", "odd"], "'odd'"),
     (["rescore", "--run", "R", "--max-pairs", "0"], "'--max-pairs'"),
     (["serve", "policy", "demo", "--json"], "`leret serve` prints no JSON; remove --json"),
     (["recipes", "show", "dmo-sft"], "did you mean training/demo-sft.yaml?")]
)  # fmt: skip
def test_wrong_usage_exits_2_in_one_line(args, says):
    code, out = leret(*args)
    assert (code, out.count("\n"), out.startswith("error: "), says in out) == (2, 1, True, True), out


def test_a_group_without_a_command_shows_its_help_and_succeeds():
    code, out = leret("store")
    assert (code, "leret store" in out, "Commands" in out) == (0, True, True)


def test_the_traceback_is_shown_with_debug_alone(tmp_path):
    for debug in ([], ["--debug"]):
        code, out = leret("rescore", "--run", tmp_path, *debug)
        assert (code, out.count("error: "), "Traceback" in out) == (2, 1, bool(debug))


def wrapped_interrupt():
    """Return what class creation makes of Ctrl-C on Python 3.11."""
    error = RuntimeError("Error calling __set_name__ on 'Field' instance")
    error.__cause__ = KeyboardInterrupt()
    return error


def test_failures_end_in_one_line(monkeypatch):
    for error, code, says in (
        (ZeroDivisionError("odd"), 1, "error: unexpected ZeroDivisionError: odd"),
        (KeyboardInterrupt(), 130, "stopped; "),
        (wrapped_interrupt(), 130, "error: stopped; "),
    ):
        monkeypatch.setattr("leret.core.bundled.names", Mock(side_effect=error))
        got, out = leret("recipes", "list")
        assert (got, out.count("\n"), out.startswith(says)) == (code, 1, True)


def test_interrupt_during_the_first_imports_is_one_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "leret.cli.app")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [Mock(**{"find_spec.side_effect": wrapped_interrupt()})])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 130
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: stopped; ")


def test_a_warning_is_no_command_of_the_terminal():
    leret("recipes", "list")
    record = logging.LogRecord("leret", logging.WARNING, "", 0, "refused: %s", ("a\x1b[31mb\u202ec",), None)
    assert logging.lastResort.format(record) == "refused: a[U+001B][31mb[U+202E]c"
