import json
import os
import subprocess
import sys
from itertools import chain

import pytest
from safetensors.torch import load_file

from leret.core.errors import TrainingError
from leret.extras.keep_rollouts import KeepRLOO
from leret.policies.serving.launch import free_port
from leret.training.rounds import algorithm
from leret.training.rounds.grpo import GRPORecipe
from leret.training.rounds.ppo import PPORecipe
from leret.training.stage import train
from tests.sampling.fakes import ROOT, events_of
from tests.training.rounds import conftest
from tests.training.training_runs import ONLINE, changed

run = conftest.run
SMALL = {**ONLINE, "questions_per_round": 2, "per_device_train_batch_size": 3}
ONE_UPDATE = {**SMALL, "max_steps": 1, "per_device_train_batch_size": 8}  # 16 completions
TWO_ROUNDS = {**SMALL, "max_steps": 4, "num_mini_batches": 2}
RECIPES = {
    "rloo": KeepRLOO(**ONE_UPDATE, keep_rollouts="either"),
    "ppo-rounds": PPORecipe(**TWO_ROUNDS, num_iterations=1),
    "stopped": GRPORecipe(**SMALL, max_steps=6, save_steps=50, eval_steps=2, eval_tasks=2, eval_split="train"),
}
RECIPES = {name: changed(recipe, name=name) for name, recipe in RECIPES.items()}

PROCESS = """
import sys, traceback
from pathlib import Path
from leret.core.runs import Run
from leret.training.processes import from_main
from leret.training.stage import train
from tests.training import training_runs
from tests.training.test_processes import RECIPES
_, path, rank = sys.argv
run = Run.open(Path(path))
for name in RECIPES:
    signalled = (name, rank) == ("stopped", "1")
    progress = training_runs.Stopper(3, training_runs.interrupt) if signalled else None
    try:
        train(RECIPES[name], run, progress=progress)
    except KeyboardInterrupt:
        traceback.print_exc()
print("stopped", file=sys.stderr)
from_main(training_runs.fail)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory, base):
    """A run, and exit codes and messages of two processes.

    They train all recipes; the second process gets a signal at step 3 of ``stopped``. Then the main process fails.
    """
    run = conftest.online_run(tmp_path_factory.mktemp("processes"), base)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": "2"}
    started = []
    for rank in ("0", "1"):
        environment = os.environ | group | {"RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "1"}
        command = [sys.executable, "-c", PROCESS, str(run.path), rank]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    messages = [process.communicate(timeout=300)[1] for process in started]
    return run, [process.returncode for process in started], messages


def same(of, *policies):
    one, two = map(of, policies)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == pytest.approx(two[name], abs=1e-5), name


def weights(policy):
    return {name: weight.numpy() for name, weight in load_file(policy / "model.safetensors").items()}


def figures(policy):
    entries = json.loads((policy / "training.json").read_text())["log_history"]
    columns = {"loss", "loss/policy_avg", "loss/value_avg", "eval_recall"}.intersection(chain.from_iterable(entries))
    return {name: [entry[name] for entry in entries if name in entry] for name in columns}


def test_a_failure_of_the_main_process_ends_both(ended):
    _, codes, messages = ended
    assert codes == [1, 1], messages
    failures = [message.rpartition("stopped\n")[2] for message in messages]
    assert ("ZeroDivisionError" in failures[0], "Traceback" in failures[1]) == (True, False), messages


def test_two_processes_train_as_one(ended):
    run, *_ = ended
    names = [name for name in RECIPES if name != "stopped"]
    for name in names:
        alone = train(changed(RECIPES[name], name=f"one-{name}"), run).path
        same(figures, alone, run.policies / name)
        if "-" not in name:
            same(weights, alone, run.policies / name)
    assert [event["policy"] for event in events_of(run) if event["event"] == "done"][: len(names)] == names


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(ended):
    run, _, messages = ended
    recipe = RECIPES["stopped"]
    assert all("KeyboardInterrupt" in message for message in messages), messages
    resumed = train(recipe, run)
    assert resumed.resumed_from == 4  # the step after the signal
    same(figures, resumed.path, train(changed(recipe, name="straight"), run).path)


def test_sharded_models_are_refused(run, monkeypatch):
    monkeypatch.setattr(algorithm, "N_PROCESSES", 2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(TrainingError, match=r"fsdp and zero3 shard it; use --launch multi"):
        train(RECIPES["rloo"], run)


def test_a_launch_of_a_failing_process_prints_no_traceback(tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text("import sys\nprint('error: once', file=sys.stderr)\nsys.exit(2)\n")
    port = str(free_port("127.0.0.1"))
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port"
    command = [sys.executable, "-m", "leret.training.processes", *options.split(), port, str(failing)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert ("error: once" in done.stderr, "Traceback" in done.stderr) == (True, False)
