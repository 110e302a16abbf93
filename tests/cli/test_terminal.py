"""Commands on a real pseudo-terminal of 80 columns: they end, Ctrl-C ends them within seconds, and they go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 80
PROMPT_S = 15
"""Seconds within which Ctrl-C has to end a command."""

SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Spawn = Callable[..., pexpect.spawn]


@pytest.fixture
def leret() -> Iterator[Spawn]:
    """Starts a command on a terminal of its own; what is left of it goes with the test."""
    started: list[pexpect.spawn] = []

    def spawn(*args: str | Path) -> pexpect.spawn:
        command = ["-m", "leret", *map(str, args)]
        child = pexpect.spawn(
            sys.executable, command, cwd=str(ROOT), dimensions=(40, COLUMNS), encoding="utf-8", timeout=120
        )
        started.append(child)
        return child

    yield spawn
    for child in started:
        child.close(force=True)


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


SMALL = settings("data.limit=40", "sampling.prompts=2", "sampling.bank.candidates=2",
                 "sampling.bank.train_questions=8", "sampling.bank.dev_questions=6")  # fmt: skip
"""Makes the demo's sampling, prompt bank included, a matter of seconds."""


def ended(child: pexpect.spawn) -> tuple[int | None, str]:
    """Exit code and the rest of the output of a command that is left alone."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, SEQUENCES.sub("", child.before)


def interrupted(child: pexpect.spawn, when: str) -> None:
    """Ctrl-C, typed at some sight, ends a command soon, with 130 and one line."""
    child.expect(when)
    child.sendintr()
    child.expect(pexpect.EOF, timeout=PROMPT_S)
    child.close()
    assert child.exitstatus == 130, child.before
    assert "error: stopped; " in child.before
    assert "Traceback" not in child.before


def test_sampling_with_a_bank_stops_and_goes_on(leret: Spawn, tmp_path: Path) -> None:
    command = ["sample", "demo", "--run", tmp_path / "r", *SMALL]
    interrupted(leret(*command), "prompt bank")
    code, screen = ended(leret(*command))
    assert code == 0, screen
    assert "sampled into" in screen


def test_a_training_stops_and_goes_on(leret: Spawn, sampled: Path) -> None:
    command = [
        "train",
        "demo-sft",
        "--run",
        sampled,
        *settings("num_train_epochs=6", "name=long", "per_device_train_batch_size=1"),
    ]
    interrupted(leret(*command), r"train long .*[1-9]\d*/")
    code, screen = ended(leret(*command))
    assert code == 0, screen
    assert "resumed" in screen


def test_an_evaluation_stops_and_goes_on(leret: Spawn, sampled: Path) -> None:
    command = ["eval", "demo", "--run", sampled, *settings("limit=60", "systems=[base]")]
    interrupted(leret(*command), r"evaluating base .*[1-9]\d*/60")
    code, screen = ended(leret(*command))
    assert code == 0, screen
    assert not re.search(r"evaluating base .*?/60", screen)  # the rest alone, if there is one


def test_a_loop_stops_and_goes_on(leret: Spawn, tmp_path: Path) -> None:
    command = ["run", "sampling/demo.yaml", "training/demo-sft.yaml", "--run", tmp_path / "r", *SMALL]
    interrupted(leret(*command), r"sampling .*[1-9]\d*/40")
    code, screen = ended(leret(*command))
    assert code == 0, screen
    assert (tmp_path / "r" / "policies" / "sft").is_dir()


def test_an_index_build_stops_and_is_made_by_the_same_command(leret: Spawn, tmp_path: Path) -> None:
    command = ["index", "build", "sampling/demo.yaml", "--out", tmp_path / "index"]
    interrupted(leret(*command), "index words")
    code, screen = ended(leret(*command))
    assert code == 0, screen
    assert (tmp_path / "index").is_dir()


def test_the_demo_stops_and_goes_on(leret: Spawn, tmp_path: Path) -> None:
    command = ["demo", "--run", tmp_path / "r"]
    interrupted(leret(*command), r"sampling .*[1-9]\d*/600")
    child = leret(*command)
    interrupted(child, r"sampling .*\d+/\d+")
    assert "prompt bank" not in child.before  # it was made before


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled run."""
    run = tmp_path_factory.mktemp("sampled") / "r"
    text, code = pexpect.run(
        f"{sys.executable} -m leret sample demo --run {run} {' '.join(SMALL)}", withexitstatus=True, timeout=120,
        cwd=str(ROOT), encoding="utf-8",
    )  # fmt: skip
    assert code == 0, text
    return run
