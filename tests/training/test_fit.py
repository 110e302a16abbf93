"""An interrupted and resumed training ends in the same bits as one that was left alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leret.core.errors import RunError
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.checkpoints import CheckpointDirectory
from leret.training.stage import plan, train
from tests.training.training_runs import sampled_run

ROOT = Path(__file__).parents[2]
KEYS = {"learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 4, "logging_steps": 2}
SFT = SFTRecipe(per_device_train_batch_size=4, **KEYS)
IPO = IPORecipe(per_device_train_batch_size=8, **KEYS)


class Stopper:
    """A progress that does something at a step."""

    def __init__(self, step, what):
        self.step, self.what, self.seen = step, what, 0

    def start(self, stage, total): ...

    def finish(self): ...

    def advance(self, n=1, **facts):
        self.seen += n
        if self.seen == self.step:
            self.what()


class PowerCutError(Exception): ...


def fail():
    raise PowerCutError


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, base):
    """The weights of trainings that were left alone."""
    reports = {}

    def weights(recipe):
        if recipe not in reports:
            reports[recipe] = train(recipe, sampled_run(tmp_path_factory.mktemp("straight") / "run", base))
        assert reports[recipe].steps == 12
        return load_file(reports[recipe].path / "model.safetensors")

    return weights


def assert_same_bits(report, expected):
    weights = load_file(report.path / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("recipe", [SFT, IPO], ids=["sft", "ipo"])
@pytest.mark.parametrize("what", [fail, interrupt])
def test_a_resumed_training_ends_in_the_same_bits(tmp_path, base, straight, recipe, what):
    run = sampled_run(tmp_path / "stopped", base)
    with pytest.raises(PowerCutError if what is fail else KeyboardInterrupt):
        train(recipe, run, progress=Stopper(6, what))
    assert not (run.policies / recipe.policy_name).exists()
    # A crash goes back to the last checkpoint, an interrupt writes one after the step that is being done.
    expected = 4 if what is fail else 7
    assert plan(recipe, run).resumes_at == expected
    resumed = train(recipe, run)
    assert resumed.resumed_from == expected
    assert_same_bits(resumed, straight(recipe))


def test_a_training_interrupted_at_its_last_step_only_has_to_be_finished(tmp_path, base, straight):
    run = sampled_run(tmp_path / "run", base)
    with pytest.raises(KeyboardInterrupt):
        train(SFT, run, progress=Stopper(12, interrupt))
    report = train(SFT, run)
    assert (report.resumed_from, report.steps) == (12, 12)
    assert_same_bits(report, straight(SFT))


def test_a_full_disk_is_one_message_and_the_run_goes_on_from_there(tmp_path, base, straight):
    import resource

    run = sampled_run(tmp_path / "run", base)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # less than the weights, more than the rest
    try:
        with pytest.raises(RunError, match="cannot be written"):
            train(SFT, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (run.policies / "sft").exists()
    assert_same_bits(train(SFT, run), straight(SFT))


def test_a_killed_process_goes_on_from_its_last_checkpoint(tmp_path, base, straight):
    run = sampled_run(tmp_path / "killed", base)
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from leret.core.runs import Run\n"
        "from leret.training.stage import train\n"
        "from tests.training.test_fit import SFT, Stopper\n"
        "stopper = Stopper(10, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        f"train(SFT, Run.open(Path({str(run.path)!r})), progress=stopper)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    cut = CheckpointDirectory(run.policies, "sft").path / "checkpoint-8" / "trainer_state.json"
    cut.write_text(cut.read_text()[:20])  # as if the crash had come while this checkpoint was written
    resumed = train(SFT, run)
    assert resumed.resumed_from == 4
    assert_same_bits(resumed, straight(SFT))


def test_an_interrupted_training_refuses_another_recipe(tmp_path, base):
    run = sampled_run(tmp_path / "run", base)
    with pytest.raises(PowerCutError):
        train(SFT, run, progress=Stopper(6, fail))
    other = SFTRecipe(**{**SFT.model_dump(), "seed": 5})
    with pytest.raises(RunError, match=r"\.sft was begun with another recipe:\n  seed: 0 in the run, 5 in the recipe"):
        train(other, run)


def test_two_processes_do_not_train_under_one_name(tmp_path, base):
    run = sampled_run(tmp_path / "run", base)
    with (
        CheckpointDirectory(run.policies, "sft").lock(),
        pytest.raises(RunError, match=r"\.sft is being trained by another"),
    ):
        train(SFT, run, progress=Stopper(1, fail))
    with pytest.raises(PowerCutError):
        train(SFT, run, progress=Stopper(1, fail))


def test_the_seed_decides_the_weights(tmp_path, base, straight):
    other = train(SFTRecipe(**{**SFT.model_dump(), "seed": 1}), sampled_run(tmp_path / "run", base))
    weights = load_file(other.path / "model.safetensors")
    assert any(not torch.equal(value, weights[name]) for name, value in straight(SFT).items())


def test_a_control_interrupted_at_its_last_step_takes_no_step_more(tmp_path, base):
    run = sampled_run(tmp_path / "run", base)
    (run.policies / "other").mkdir(parents=True)
    (run.policies / "other" / "training.json").write_text('{"total_steps": 8}')  # 6 steps an epoch
    control = SFTRecipe(**{**SFT.model_dump(), "match_steps_of": "other"})
    with pytest.raises(KeyboardInterrupt):
        train(control, run, progress=Stopper(8, interrupt))
    weights = load_file(CheckpointDirectory(run.policies, "sft").path / "checkpoint-8" / "model.safetensors")
    report = train(control, run)
    assert (report.resumed_from, report.steps) == (8, 8)
    assert_same_bits(report, weights)
