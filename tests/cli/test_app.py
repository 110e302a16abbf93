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

from leret.cli import app

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    code, out = leret(*command.split(), "--help")
    assert code == 0
    assert "Usage:" in out


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


def test_commands_are_grouped_in_the_order_of_use() -> None:
    out = leret("--help")[1]
    assert re.findall(r"─ (Start here|Loop|Data and retrieval|Serving) ─", out) == [
        "Start here", "Loop", "Data and retrieval", "Serving"
    ]  # fmt: skip


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


def test_the_example_of_set_is_a_key_of_the_command() -> None:
    for command, key in (("sample", "sampling.samples"), ("train", "learning_rate"), ("eval", "limit"),
                         ("data inspect", "data.split")):  # fmt: skip
        assert f"Override a key: {key}=" in " ".join(leret(*command.split(), "--help")[1].replace("│", " ").split())


def test_help_takes_less_than_half_a_second() -> None:
    def cpu_s() -> float:  # of finished children: wall clock would judge what else the machine does
        times = os.times()
        return times.children_user + times.children_system

    def one_s() -> float:
        began = cpu_s()
        subprocess.run([sys.executable, "-m", "leret", "--help"], check=True, capture_output=True, cwd=ROOT)
        return cpu_s() - began

    assert any(one_s() < 0.5 for _ in range(10))


def test_help_says_what_a_flag_is_by_default() -> None:
    code, output = leret("eval-retriever", "--help")
    assert code == 0
    assert "first record)]" in " ".join(output.replace("│", " ").split())


def test_the_version_is_shown() -> None:
    assert leret("--version") == (0, "leret 0.1.0\n")


def test_completion_is_offered() -> None:
    environment = {**os.environ, "_LERET_COMPLETE": "source_bash"}
    run = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'leret'; from leret.cli import main; main()"],
        env=environment, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert "leret" in run.stdout.lower()


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


def test_recipes_are_listed_with_their_purpose() -> None:
    code, out = leret("recipes", "list")
    assert code == 0
    assert re.search(r"^ *sampling/hotpotqa\.yaml +HotpotQA", out, re.MULTILINE)


def test_a_recipe_is_copied_once(tmp_path: Path) -> None:
    code, out = leret("recipes", "copy", "sampling/demo.yaml", tmp_path)
    assert (code, "wrote" in out) == (0, True)
    assert leret("recipes", "copy", "sampling/demo.yaml", tmp_path) == (
        0,
        "nothing to do: all of it is there already\n",
    )


def test_a_recipe_is_shown_by_its_short_name() -> None:
    shown = (ROOT / "training" / "demo-sft.yaml").read_text(encoding="utf-8").strip()
    assert leret("recipes", "show", "demo-sft") == (0, shown + "\n")
    code, out = leret("recipes", "show", "dmo-sft")
    assert (code, "did you mean training/demo-sft.yaml?" in out, out.count("\n")) == (2, True, 1)


def test_data_are_inspected(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"doc_id": "d", "title": "T", "text": "words"}\n')
    (tmp_path / "q.jsonl").write_text('{"id": "q", "question": "Who?", "relevant_doc_ids": ["d"]}\n{"id": 3}\n')
    args = ["data", "inspect", "--questions", tmp_path / "q.jsonl", "--corpus", tmp_path / "c.jsonl"]
    code, out = leret(*args)
    assert code == 2
    assert "1 questions, 1 documents" in out
    assert "q.jsonl:2" in out
    code, out = leret(*args, "--skip-invalid", "--json")
    assert (code, json.loads(out)["n_questions"]) == (0, 1)
    code, out = leret("data", "inspect", tmp_path / "q.jsonl")
    assert (code, "--questions" in out) == (2, True)


def test_bad_lines_of_the_data_are_left_out_by_a_flag_of_sample(tmp_path: Path, small: list[str]) -> None:
    (tmp_path / "c.jsonl").write_text('{"doc_id": "d", "title": "T", "text": "words"}\n')
    (tmp_path / "q.jsonl").write_text('{"id": "q", "question": "Who?", "relevant_doc_ids": ["d"]}\n{"id": 3}\n')
    data = {
        "kind": "jsonl",
        "questions": tmp_path / "q.jsonl",
        "corpus": tmp_path / "c.jsonl",
        "split": "all",
        "options": "{}",
    }
    args = ["sample", "demo", "--run", str(tmp_path / "r"), "--dry-run", *small]
    args += [part for name, value in data.items() for part in ("--set", f"data.{name}={value}")]
    code, out = leret(*args)
    assert (code, "--skip-invalid" in out) == (2, True)
    code, out = leret(*args, "--skip-invalid", "--json")
    assert (code, json.loads(out)["questions"]) == (0, 1)


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


def test_a_dry_run_tells_the_calls_and_writes_nothing(tmp_path: Path, small: list[str]) -> None:
    code, out = leret("sample", "sampling/demo.yaml", "--run", tmp_path / "r", "--dry-run", *small)
    assert code == 0
    assert re.search(r"lm calls +24\n", out)  # 6 questions, 2 hops, 1 prompt, 2 samples
    assert not (tmp_path / "r").exists()
