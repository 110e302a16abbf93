import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.core.errors import RunError
from leret.training.algorithms.kto import KTORecipe
from leret.training.algorithms.preference import DPORecipe, IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.job import CheckpointDirectory, Interrupt
from leret.training.stage import estimate, train, train_job
from tests.training.training_runs import (
    Stopper,
    changed,
    fail,
    interrupt,
    job_in,
    kill_training,
    sampled_run,
    weights_of,
)

KEYS = {"learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 4, "logging_steps": 2}
SFT = SFTRecipe(per_device_train_batch_size=4, **KEYS)
IPO = IPORecipe(per_device_train_batch_size=8, **KEYS)
DPO = DPORecipe(per_device_train_batch_size=8, **KEYS)
KTO = KTORecipe(per_device_train_batch_size=8, **KEYS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, base):
    reports = {}

    def weights(recipe):
        if (name := recipe.algorithm) not in reports:
            reports[name] = train(recipe, sampled_run(tmp_path_factory.mktemp("straight") / "run", base))
        assert reports[name].steps == 12
        return weights_of(reports[name].path)

    return weights


@pytest.mark.parametrize(
    ("recipe", "what", "at"),
    [(SFT, fail, 4), (SFT, interrupt, 7), (IPO, fail, 4), (IPO, interrupt, 7), (DPO, fail, 4), (KTO, interrupt, 7)],
    ids=lambda one: getattr(one, "algorithm", None),
)
def test_a_resumed_training_ends_in_the_same_bits(run, straight, recipe, what, at):
    with pytest.raises(ZeroDivisionError if what is fail else KeyboardInterrupt):
        train(recipe, run, progress=Stopper(6, what))
    assert not (run.policies / recipe.policy_name).exists()
    # A crash goes back to the last checkpoint, an interrupt writes one after the step that is being done.
    assert estimate(recipe, run).resumes_at == at
    resumed = train(recipe, run)
    assert resumed.resumed_from == at
    assert weights_of(resumed.path) == straight(recipe)


@pytest.mark.parametrize("steps", [12, 8], ids=["all", "control"])
def test_a_training_stopped_at_its_last_step_takes_no_more(run, steps):
    (run.policies / "other").mkdir(parents=True)
    (run.policies / "other" / "training.json").write_text('{"total_steps": 8}')  # 6 steps an epoch
    recipe = SFT if steps == 12 else changed(SFT, match_steps_of="other")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run, progress=Stopper(steps, interrupt))
    weights = weights_of(CheckpointDirectory(run.policies, "sft").path / f"checkpoint-{steps}")
    report = train(recipe, run)
    assert (report.resumed_from, report.steps, weights_of(report.path)) == (steps, steps, weights)


def test_an_interrupt_from_another_thread_leaves_a_checkpoint(run):
    interrupt = Interrupt()
    progress = Stopper(6, lambda: setattr(interrupt, "requested", True))
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(train_job, job_in(SFT, run), progress, interrupt=interrupt).result()
    assert estimate(SFT, run).resumes_at == 7


def test_a_killed_process_goes_on_from_its_last_checkpoint(run, straight):
    kill_training(run, "tests.training.test_fit", "SFT", 9)
    cut = CheckpointDirectory(run.policies, "sft").path / "checkpoint-8" / "trainer_state.json"
    cut.write_text(cut.read_text()[:20])  # as if the crash had come while this checkpoint was written
    resumed = train(SFT, run)
    assert resumed.resumed_from == 4
    assert weights_of(resumed.path) == straight(SFT)


def test_a_full_disk_is_one_message_and_training_goes_on_after_it(run, straight):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # less than the weights, more than the rest
    try:
        with pytest.raises(RunError, match="cannot be written"):
            train(SFT, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (run.policies / "sft").exists()
    assert weights_of(train(SFT, run).path) == straight(SFT)


def test_the_seed_decides_the_weights(run, straight):
    assert weights_of(train(changed(SFT, seed=1), run).path) != straight(SFT)
