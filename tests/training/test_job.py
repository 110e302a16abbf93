import errno
import os
import resource
import signal
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from leret.core import yaml
from leret.core.errors import RunError
from leret.training.job import CheckpointDirectory, Interrupt, TrainingRecord, training_process
from leret.training.model import SavedPolicy
from leret.training.stage import estimate, train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.training.training_runs import Stopper, changed, fail, interrupt, kill_run, sampled_run, weights_of

KEYS = {"learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 4, "logging_steps": 2}
SFT = SFTRecipe(per_device_train_batch_size=4, **KEYS)
IPO = IPORecipe(per_device_train_batch_size=8, **KEYS)
RECORD = TrainingRecord(
    name="sft", algorithm="sft", key={"recipe": {"seed": 0}}, parent="base", examples=24, dropped=2, steps=6,
    total_steps=9, seconds=1.0, versions={}, log_history=[{"loss": 2.0}, {"loss": 1.0, "step": 6}],
)  # fmt: skip


def test_two_processes_do_not_train_under_one_name(run):
    directory = CheckpointDirectory(run.policies, "sft")
    with directory.lock(), pytest.raises(RunError, match=r"\.sft is being trained by another"):
        train(SFT, run)


def test_a_card_quotes_the_name_of_its_base(tmp_path):
    RECORD.write(tmp_path, "a method", SavedPolicy('C:\\a "model"', "peft"))
    front = yaml.load((tmp_path / "README.md").read_text().split("---")[1])
    expected = {"base_model": 'C:\\a "model"', "library_name": "peft", "tags": ["leret", "trl", "sft"]}
    assert expected.items() <= front.items()


@pytest.mark.parametrize(("scores", "gain", "n_notes"), [([0.5, 0.25, 0.75], 0.25, 0), ([0.5, 0.25, 0.5], 0.0, 1)])
def test_a_report_says_how_much_validation_gained(scores, gain, n_notes):
    log = [{"step": step, "eval_recall": score, "eval_unparsed": 0.9} for step, score in enumerate(scores)]
    report = replace(RECORD, log_history=log, steps=10).report(Path(), 1.0)
    assert (report.validation_gain, len(report.notes)) == (gain, n_notes)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, base):
    @cache
    def weights(algorithm):
        run = sampled_run(tmp_path_factory.mktemp("straight") / "run", base)
        report = train({"sft": SFT, "ipo": IPO}[algorithm], run)
        assert report.steps == 12
        return weights_of(report.path)

    return weights


@pytest.mark.parametrize(("recipe", "what", "at"), [(SFT, interrupt, 7), (IPO, fail, 4)])
def test_a_resumed_training_ends_in_the_same_bits_and_takes_no_other_recipe(run, straight, recipe, what, at):
    with pytest.raises(ZeroDivisionError):
        train(changed(recipe, seed=4), run, progress=Stopper(1, fail))  # before the first checkpoint
    with pytest.raises(ZeroDivisionError if what is fail else KeyboardInterrupt):
        train(recipe, run, progress=Stopper(6, what))
    assert not (run.policies / recipe.policy_name).exists()
    with pytest.raises(RunError, match="was started with a different recipe:\n  seed: 0 in the run, 5 in"):
        train(changed(recipe, seed=5), run)
    # A crash goes back to the last checkpoint, an interrupt writes one after the step that is being done.
    assert (estimate(recipe, run).resumes_at, estimate(recipe, run).done) == (at, False)
    resumed = train(recipe, run)
    assert resumed.resumed_from == at
    assert weights_of(resumed.path) == straight(recipe.algorithm)
    # A finished policy is left alone.
    assert estimate(recipe, run).done
    again = train(changed(recipe, save_steps=7, logging_steps=3), run)
    assert (again.already, again.steps, again.loss_last) == (True, resumed.steps, resumed.loss_last)
    with pytest.raises(RunError, match=r"learning_rate: 0\.001 in the run, 0\.002 in the recipe"):
        train(changed(recipe, learning_rate=2e-3), run)


def test_a_training_stopped_at_its_last_step_takes_no_more(run):
    with pytest.raises(KeyboardInterrupt):
        train(SFT, run, progress=Stopper(12, interrupt))
    weights = weights_of(CheckpointDirectory(run.policies, "sft").path / "checkpoint-12")
    report = train(SFT, run)
    assert (report.resumed_from, report.steps, weights_of(report.path)) == (12, 12, weights)


def test_a_killed_process_goes_on_from_its_last_checkpoint(run, straight):
    kill_run(run, SFT, 9)
    cut = CheckpointDirectory(run.policies, "sft").path / "checkpoint-8" / "trainer_state.json"
    cut.write_text(cut.read_text()[:20])  # as if the crash had come while this checkpoint was written
    resumed = train(SFT, run)
    assert resumed.resumed_from == 4
    assert weights_of(resumed.path) == straight("sft")


def test_a_full_disk_is_one_message_and_training_goes_on_after_it_by_its_seed(run, straight):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # less than the weights, more than the rest
    try:
        with pytest.raises(RunError, match="cannot be written"):
            train(SFT, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (run.policies / "sft").exists()
    assert weights_of(train(SFT, run).path) == straight("sft")
    assert weights_of(train(changed(SFT, name="other", seed=1), run).path) != straight("sft")


@pytest.mark.parametrize(
    ("raised", "full"),
    [("PytorchStreamWriter failed writing file", True), ("unexpected pos 64 vs 0", True), ("a shape is wrong", False)],
)
def test_a_full_disk_is_an_os_error_whichever_library_says_it(raised, full):
    with pytest.raises(OSError if full else RuntimeError) as caught, training_process(None):
        raise RuntimeError(raised)
    assert getattr(caught.value, "errno", None) == (errno.ENOSPC if full else None)


def test_a_second_signal_ends_at_once_and_the_handlers_are_put_back(caplog):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    asked = Interrupt()
    with suppress(KeyboardInterrupt), asked.handled():  # which ends so after any signal
        interrupt()
        assert asked.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [message[:25] for message in caplog.messages] == ["stopping after this step;"]
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
