import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from leret.core.errors import TrainingError
from leret.training import stage
from leret.training.stage import estimate, train
from leret.training.stored.kto import KTORecipe
from leret.training.stored.preference import DPORecipe, IPORecipe
from leret.training.stored.sft import SFTRecipe
from leret.training.stored.trainer import TRLEngine
from tests.sampling.fakes import events_of
from tests.training.training_runs import Stopper, changed, log, record, sampled_run, train_ids

KEYS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8}
SFT = SFTRecipe(num_train_epochs=2, logging_steps=1, **KEYS)
IPO = IPORecipe(init_from="sft", num_train_epochs=4, logging_steps=1, **KEYS)
DPO = DPORecipe(num_train_epochs=4, losses={"sft": 0.2}, **KEYS)
POLICY_FILES = {"model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"}


def test_sft_then_ipo_lower_their_losses_and_leave_policies_without_pickles(run, capfd):
    told, shown = estimate(SFT, run), Stopper()
    assert (told.examples, told.steps, told.done, told.resumes_at) == (24, 6, False, 0)
    sft = train(SFT, run, progress=shown)
    assert (sft.examples, sft.steps, sft.total_steps) == (24, 6, 6)
    assert (shown.started, shown.done) == ([("train sft", 6)], 6)
    assert shown.facts["loss"] == pytest.approx(sft.loss_last, rel=0.5)
    with pytest.raises(TrainingError, match=r"match_steps_of: .* has no trained policy 'ipo'"):
        train(changed(SFT, name="sft-more", match_steps_of="ipo"), run)
    ipo = train(IPO, run)
    assert "it/s" not in capfd.readouterr().err, "a progress bar of TRL"
    # adjacent pairs: two a state, 48 pairs, 4 epochs of 6 batches, on top of sft's steps
    assert (ipo.examples, ipo.steps, ipo.total_steps) == (48, 24, 30)
    assert ipo.loss_first == pytest.approx(100.0), "1 / (4 beta^2) while the policy is its own reference"
    assert not list(run.policies.glob(".*"))
    reports = sft, ipo, train(DPO, run)
    for report in reports:
        assert report.loss_last < report.loss_first
        files = {path.name for path in report.path.iterdir()}
        assert files >= POLICY_FILES
        assert not [file for file in files if file.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert {"loss", "grad_norm", "rewards/margins", "rewards/accuracies", "step"} <= set(log(ipo)[0])
    assert [record(report)["parent"] for report in reports] == ["base", "sft", "base"]
    assert run.manifest.training["ipo"]["recipe"]["reduction"] == "sequence"
    assert next(event for event in events_of(run) if event["event"] == "done")["policy"] == "sft"
    # A control takes as many steps as the two together.
    more = train(changed(SFT, name="sft-more", match_steps_of="ipo"), run)
    assert more.steps == more.total_steps == 30
    with pytest.raises(
        TrainingError, match=r"match_steps_of: 'sft' was trained for 6 steps in .*'ipo' .* already trained for 30"
    ):
        train(changed(SFT, name="less", init_from="ipo", match_steps_of="sft"), run)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_names_the_keys_to_lower(run, monkeypatch, error):
    monkeypatch.setattr(stage, "fit", Mock(side_effect=error))
    with pytest.raises(TrainingError, match=r"sft ran out of memory; lower per_device_train_batch_size .* max_length"):
        train(SFT, run)
    monkeypatch.setattr(stage, "fit", Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(SFT, run)


def test_another_dspy_than_at_sampling_is_a_warning(run, caplog):
    run.update(versions={**run.manifest.versions, "dspy": "0"})
    estimate(SFT, run)
    assert "the run was sampled with dspy 0, and dspy" in caplog.text


def test_a_run_without_spread_has_nothing_to_train_on(tmp_path, base):
    run = sampled_run(tmp_path / "run", base, spread=False)
    for recipe, says in (
        (SFT, "no state has samples that differ in reward"),
        (DPO, r"train\.parquet holds no pair"),
        (KTORecipe(), "0 desirable and 0 undesirable completions, and KTO needs both kinds"),
    ):
        with pytest.raises(TrainingError, match=says):
            train(recipe, run)
    assert estimate(changed(SFT, require_spread=False), run).examples == 24


def test_a_question_that_evaluation_holds_out_is_refused_and_so_is_a_run_that_does_not_say_which(run):
    run.held_out.write_text(json.dumps(["other", *train_ids(2)]))
    with pytest.raises(TrainingError, match=r"2 training questions \(by id or text\) are also in the evaluation"):
        train(SFT, run)
    run.held_out.unlink()
    with pytest.raises(TrainingError, match=r"held_out\.json .*is missing; write it with `leret sample`"):
        train(SFT, run)


def test_under_deepspeed_a_last_checkpoint_is_refused_with_what_to_remove(tmp_path):
    engine = TRLEngine.__new__(TRLEngine)
    engine.trainer = SimpleNamespace(is_deepspeed_enabled=True)
    with pytest.raises(TrainingError, match=f"delete {tmp_path} and run the command again"):
        engine.load(tmp_path)
