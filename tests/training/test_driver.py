import sys
from importlib.machinery import ModuleSpec
from unittest.mock import Mock

import pytest

from leret.core.errors import MissingDependency, TrainingError
from leret.training import watch
from leret.training.stage import estimate, train
from leret.training.stored.sft import SFTRecipe
from leret.training.watch import monitored
from tests.sampling.fakes import events_of
from tests.training.training_runs import changed, fail, record

KEYS = {"learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 4, "logging_steps": 1}
SFT = SFTRecipe(per_device_train_batch_size=4, **KEYS)  # 12 steps


def test_a_loss_that_is_no_number_stops_with_the_step(run):
    keys = {"learning_rate": 1e30, "max_grad_norm": 1e30, "num_train_epochs": 20, "logging_steps": 1}
    with pytest.raises(TrainingError, match=r"the (loss|grad_norm) is (nan|inf) at step \d+; lower learning_rate"):
        train(SFTRecipe(per_device_train_batch_size=8, **keys), run)
    assert not (run.policies / "sft").exists()


def test_an_alarm_in_a_training_stands_in_its_record_events_and_card(run, alarming, caplog):
    report = train(SFT, run)
    told = [entry.getMessage() for entry in caplog.records if entry.name == "leret"]
    assert (report.alarms, told) == (("loss",), ["sft, step 5: it is 5; do something"])
    assert [(alarm["name"], alarm["step"]) for alarm in record(report)["alarms"]] == [("loss", 5)]
    assert [e["alarm"] for e in events_of(run) if e["event"] == "alarm"] == ["loss"]
    assert "Alarm at step 5: it is 5; do something." in (report.path / "README.md").read_text()


def test_a_stop_leaves_a_checkpoint_that_warn_goes_on_from(run, alarming):
    stop = changed(SFT, on_alarm="stop")
    for _ in range(2):  # asked again, it stands where it stood
        with pytest.raises(TrainingError, match=r"alarm: step 5: it is 5; .* --set on_alarm=warn"):
            train(stop, run)
        assert estimate(stop, run).resumes_at == 5
    assert not (run.policies / "sft").exists()
    assert train(SFT, run).resumed_from == 5


@pytest.fixture
def alarming(monkeypatch):
    def at_5(log, measure="recall"):
        return [watch.Alarm("loss", 5, "it is 5; do something")] if log[-1]["step"] == 5 and "loss" in log[-1] else []

    monkeypatch.setattr(watch, "alarms", at_5)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_entry_and_is_finished_after_an_error(tmp_path, monkeypatch, name):
    tracker = Mock(__spec__=ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, name, tracker)
    recipe = changed(SFT, report_to=(name,), project="queries", run_name="third try")
    with pytest.raises(ZeroDivisionError), monitored(recipe, tmp_path) as monitor:
        monitor.see([{"step": 3, "epoch": 1, "eval_recall": 0.5, "reward": 0.25, "note": "text"}]) or fail()
    given = tracker.init.call_args.kwargs
    assert (given["project"], given["name"], given["config"]["learning_rate"]) == ("queries", "third try", 1e-3)
    tracker.init().log.assert_called_once_with({"eval/recall": 0.5, "train/reward": 0.25}, step=3)
    tracker.init().finish.assert_called_once_with()


def test_logs_of_real_trackers_lie_beside_the_policy(run, monkeypatch):
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("first", "second"):  # the second training in a process is a run of its own
        report = train(changed(SFT, report_to=("tensorboard", "wandb"), name=name, max_steps=1), run)
        for found in (f"logs/{name}/events.out*", "logs/wandb/offline-run-*/run-*.wandb"):
            assert len(list(report.path.glob(found))) == 1, name


def test_a_report_to_what_is_not_installed_names_the_extra(run, monkeypatch):
    monkeypatch.setattr(watch, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"wandb is not installed; run `pip install 'leret\[wandb\]'`"):
        train(SFTRecipe(report_to=("wandb",)), run)
    assert not (run.policies / ".sft").exists()
