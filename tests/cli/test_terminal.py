import os
import re
import sys

import pexpect
import pytest

from tests.cli.conftest import settings
from tests.cli.test_app import ROOT
from tests.first_steps import succeeds

PROMPT_S = 15  # within which Ctrl-C has to end a command


SMALL = settings({
    "data.limit": 6, "data.options": "{n_train: 30, n_dev: 10, n_test: 70}", "sampling.samples": 2,
    "sampling.prompts": 2, "sampling.bank": "{candidates: 2, train_questions: 4, dev_questions: 4}",
})  # fmt: skip


def leret(*args, cwd=ROOT):
    command, environment = ["-m", "leret", *map(str, args)], {**os.environ, "PYTHONPATH": str(ROOT)}
    size = {"dimensions": (40, 80), "encoding": "utf-8", "timeout": 120}
    return pexpect.spawn(sys.executable, command, cwd=str(cwd), env=environment, **size)


def finished(child):
    with child:
        child.expect(pexpect.EOF)
    assert child.exitstatus == 0, child.before
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", child.before)


def interrupted(child, when):
    with child:
        child.expect(when)
        child.sendintr()
        child.expect(pexpect.EOF, timeout=PROMPT_S)
    assert (child.exitstatus, "stopped; " in child.before) == (130, True), child.before
    assert "Traceback" not in child.before
    return str(child.before)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    run = tmp_path_factory.mktemp("sampled") / "r"
    succeeds("sample", "demo", "--run", run, *SMALL)
    return run


@pytest.mark.parametrize(
    ("command", "when", "says"),
    [
        (["sample", "demo", "--run", "NEW", *SMALL], "prompt bank", "sampled into"),
        pytest.param(["train", "demo-sft", "--run", "SAMPLED",
          *settings({"max_steps": 100, "name": "long", "per_device_train_batch_size": 1})],
         r"train long .*[1-9]\d*/", "resumed", marks=pytest.mark.slow),  # test_job.py interrupts trainings
        pytest.param(["eval", "demo", "--run", "SAMPLED", *settings({"limit": 60, "systems": "[base]"})],
         r"evaluating base .*[1-9]\d*/60", r"\A(?!(.|\n)*evaluating base .*?/60)",  # the rest alone, if there is one
         marks=pytest.mark.slow),
    ],
    ids=["sample", "train", "eval"],
)  # fmt: skip
def test_a_command_stops_and_goes_on(tmp_path, request, command, when, says):
    run = str(request.getfixturevalue("sampled") if "SAMPLED" in command else tmp_path / "r")
    command = [run if word in {"NEW", "SAMPLED"} else word for word in command]
    interrupted(leret(*command), when)
    screen = finished(leret(*command)) if command[0] == "eval" else succeeds(*command)
    assert re.search(says, screen), screen
