import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from leret.core.runs import Run
from leret.policies.serving.launch import free_port
from leret.policies.serving.process import ServerProcess
from leret.sampling.store.store import Store
from tests.cli.conftest import SMALL_WORLD, settings
from tests.cli.test_app import ANSI, ROOT
from tests.datasets.writing import array
from tests.first_steps import copy_recipes, edit, leret, read_lines, refused, succeeds
from tests.training.training_runs import sampled_run


def test_the_whole_loop_runs_goes_on_and_ends_at_once(tmp_path, small):
    run = ["--run", str(tmp_path / "r")]
    sample = ["sample", "sampling/demo.yaml", *run, *small]
    assert re.search(r"lm calls +24\n", succeeds(*sample, "--dry-run"))  # 6 questions, 2 hops, 1 prompt, 2 samples
    assert not (tmp_path / "r").exists()
    assert not ANSI.search(succeeds(*sample))
    assert "nothing to do" in succeeds(*sample)
    assert json.loads(succeeds("rescore", *run, "--strategy", "all", "--json"))["strategy"] == "all"
    assert json.loads(succeeds("store", "check", *run, "--json"))["faults"] == []
    train = ["train", "training/sft.yaml", *run, "--set", "learning_rate=1e-3", "--set", "require_spread=false"]
    assert json.loads(succeeds(*train, "--dry-run", "--json"))["examples"] > 0
    out = succeeds(*train)
    assert re.search(r"note: a short training \(examples: \d+, optimizer steps: \d\)", out)
    rows = {line.strip().partition("  ")[0] for line in out.splitlines()}
    assert "steps" in rows
    assert rows.isdisjoint({"total steps", "loss last", "resumed from", "dropped", "rounds", "best step"})
    assert f"leret eval RECIPE --run {tmp_path / 'r'}" in out
    assert "nothing to do" in succeeds(*train)
    measure = ["eval", "eval/demo.yaml", *run, "--set", "limit=5", "--set", "resamples=100"]
    assert re.search(r"lm calls +20\n", succeeds(*measure, "--dry-run"))  # base and sft, 5 questions, 2 hops
    out = succeeds(*measure)
    summary = json.loads((tmp_path / "r" / "eval" / "summary.json").read_text())
    systems = [row["system"] for row in summary["rows"]]
    assert systems == ["raw-question", "oracle-titles", "base", "sft"]
    assert all(system in out for system in systems)
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.count('<details class="question">') == 6 + 5  # sampled and evaluated questions
    (tmp_path / "r" / "report.html").write_text("")
    assert "report.html" in succeeds("view", tmp_path / "r", "--report")
    assert (tmp_path / "r" / "report.html").read_text() == page
    assert "nothing to do" in succeeds(*measure)
    assert json.loads(succeeds(*measure, "--json")) == summary


def test_a_command_in_a_terminal_stops_at_ctrl_c_and_goes_on(tmp_path):
    options, bank = "{n_train: 30, n_dev: 10, n_test: 70}", "{candidates: 2, train_questions: 4, dev_questions: 4}"
    small = {"data.limit": 6, "data.options": options, "sampling.prompts": 2, "sampling.bank": bank}
    command = ["sample", "demo", "--run", str(tmp_path / "r"), *settings(small)]
    terminal = {"dimensions": (40, 80), "encoding": "utf-8", "timeout": 120}
    with pexpect.spawn(sys.executable, ["-m", "leret", *command], cwd=str(ROOT), **terminal) as child:
        child.expect("prompt bank")
        child.sendintr()
        child.expect(pexpect.EOF, timeout=15)
    assert (child.exitstatus, "stopped; " in child.before) == (130, True), child.before
    assert "Traceback" not in child.before
    assert "sampled into" in succeeds(*command)


def test_two_rounds_sample_two_halves_and_the_report_shows_them(tmp_path, small):
    stages = ["sampling/demo.yaml", "training/sft.yaml", "eval/demo.yaml", "--run", str(tmp_path / "r"), *small]
    stages += settings({"require_spread": "false", "limit": 3, "systems": "[policies]", "resamples": 100})
    stages += ["--set", "baseline=sft", "--rounds", "2"]
    succeeds("run", *stages)
    run = Run.open(tmp_path / "r")
    rounds = run.manifest.rounds
    assert [(entry["policy"], entry["part"]) for entry in rounds] == [(rounds[0]["policy"], "0/2"), ("sft", "1/2")]
    with Store(run.store, read_only=True) as store:
        first, second = ({g.state.task_id for g in store.groups(entry["digest"])} for entry in rounds)
    assert (len(first), len(second), first & second) == (3, 3, set())
    assert {row["system"] for row in json.loads((run.eval / "summary.json").read_text())["rows"]} >= {"sft", "sft-2"}
    assert "sampled from" in run.report.read_text()
    assert "already done" in succeeds("run", *stages)


def test_query_augmentation_trains_on_a_users_lines_and_compares(folder):
    edit("questions.jsonl", '"question"', '"query"')
    array(Path("corpus.json"), read_lines("corpus.jsonl"))
    keys = {"data.kind": "jsonl", "data.questions": "questions.jsonl", "data.corpus": "corpus.json", "data.limit": 8}
    keys |= {"train.max_steps": 4, "train.questions_per_round": 4, "eval.limit": 3, "eval.resamples": 100}
    command = ["run", "query-augmentation", *settings(keys)]
    plan = json.loads(succeeds(*command, "--dry-run", "--json").splitlines()[-1])  # after a warning of the policy
    assert [step.split(": ")[1].split()[0] for step in plan.values()] == ["sample", "train", "eval"]
    assert not Path("runs").exists()
    succeeds(*command)
    rows = json.loads(Path("runs/query-augmentation/eval/summary.json").read_text())["rows"]
    assert {row["system"] for row in rows} == {"raw-question", "hyde", "base", "ppo"}
    entry = json.loads(Path("runs/query-augmentation/policies/ppo/training.json").read_text())["log_history"][0]
    assert {"reward", "kl", "loss/value_avg"} <= set(entry)


def test_agentic_rag_trains_on_a_world_and_takes_a_users_data_by_two_keys(folder):
    keys = {"data.limit": 2, "data.options": SMALL_WORLD, "train.limit": 2, "train.questions_per_round": 1}
    keys |= {"train.num_generations": 2, "eval.limit": 2, "eval.resamples": 100, "program.max_iters": 1}
    table = succeeds("run", "agentic-rag", *settings(keys))
    assert re.search(r"^ raw-question +\d.* - +0$", table, re.MULTILINE), table  # searches, and does not answer
    assert "reciprocal" in table
    run = Path("runs/agentic-rag")
    rows = {row["system"]: row for row in json.loads((run / "eval/summary.json").read_text())["rows"]}
    assert set(rows) == {"raw-question", "base", "grpo"}
    raw = rows["raw-question"]
    assert (raw["lm_calls"], len(raw["hops"][0]["rr_ci"]), raw["hops"][-1]["f1"]) == (0, 2, None)
    assert all(rows["grpo"]["hops"][-1][name] is not None for name in ("rr", "f1", "format"))
    log = json.loads((run / "policies/grpo/training.json").read_text())["log_history"]
    parts = {f"rewards/{name}/mean" for name in ("rr", "final", "final.rr", "final.f1", "final.format")}
    assert parts | {"completions/unparsed", "reward_percentiles/50"} <= set(log[0])
    page = (run / "report.html").read_text()
    assert all(title in page for title in ("mean of each reward part", "share of unparsed completions", "step 1"))
    own = {"data.kind": "jsonl", "data.questions": "questions.jsonl", "data.corpus": "corpus.jsonl"}
    plan = succeeds("run", "agentic-rag", *settings(own), "--run", "runs/own", "--dry-run")
    assert [step for step in ("sample", "train", "eval") if step not in plan] == []


class Process:
    """Runs a command in this process, which has imported the libraries."""

    def __init__(self, command, environment, log, key):
        succeeds(*command[3:])

    def exit_code(self):
        return 0

    def stop(self, timeout_s):
        pass


@pytest.mark.parametrize("process", [pytest.param(ServerProcess, marks=pytest.mark.slow), Process])
def test_the_demo_leaves_a_table_a_report_and_a_program(tmp_path, monkeypatch, caplog, process):
    copy_recipes(tmp_path)
    edit(tmp_path / "sampling/demo.yaml", "limit: 16", "limit: 8")
    monkeypatch.chdir(tmp_path)  # recipes here come before the shipped ones
    monkeypatch.setattr("leret.policies.serving.process.ServerProcess", process)
    succeeds("demo", "--seed", "1")
    rows = json.loads(Path("runs/demo/eval/summary.json").read_text())["rows"]
    trained = {"sft", "ipo", "grpo"}
    assert {row["system"] for row in rows} == {"raw-question", "oracle-titles", "base", *trained}
    events = [event for event in read_lines("runs/demo/events.jsonl") if event["event"] == "evaluated"]
    evaluated = [(event["name"] or "", event["system"]) for event in events]
    on_dev = [("dev", name) for name in ("sft", "ipo", "grpo")]
    assert sorted(evaluated) == sorted([*(("", row["system"]) for row in rows), *on_dev])  # each once
    assert Path("runs/demo/report.html").is_file()
    assert Path("runs/demo/program/program.json").is_file()
    assert "a process beside the demo failed" not in caplog.text


@pytest.mark.usefixtures("folder")
def test_sampling_recipe_alone_takes_the_recipes_of_its_name():
    files = ["--set", "data.questions=questions.jsonl", "--set", "data.corpus=corpus.jsonl", "--dry-run", "--json"]
    for name in ("expand-pick", "sampling/expand-pick.yaml"):
        stages = json.loads(succeeds("run", name, *files, "--set", "num_train_epochs=1"))
        assert [title.split()[2] for title in stages.values()] == ["sample", "train", "eval"]
    stages = json.loads(succeeds("run", "expand-pick", "expand-pick", *files))
    assert len(stages) == 2


@pytest.mark.slow  # test_processes.py trains with two processes that do not shard
def test_two_processes_that_shard_the_policy_train_as_one_does(tmp_path, policy, monkeypatch):
    run = sampled_run(tmp_path / "r", policy)
    steps = ["--run", run.path, "--set", "max_steps=3", "--set", "logging_steps=1"]
    adapter = ["--set", "name=adapter", "--set", "lora={r: 4, alpha: 8}", "--set", "learning_rate=0.05"]
    succeeds("train", "training/sft.yaml", *steps, *adapter)
    shipped = (ROOT / "training/accelerate/fsdp.yaml").read_text()
    here = shipped.replace("use_cpu: false", "use_cpu: true").replace("num_processes: 4", "num_processes: 2")
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"{here}main_process_port: {free_port('127.0.0.1')}\n")
    # full weights, from an adapter that is merged into them: the reference is the merged model, not the adapter's base
    train = ["train", "training/ipo.yaml", *steps, "--set", "init_from=adapter", "--set", "learning_rate=1e-3"]
    succeeds(*train, "--set", "name=one", "--set", "per_device_train_batch_size=8")
    train += ["--set", "name=two", "--set", "per_device_train_batch_size=4", "--launch", file]
    command = [sys.executable, "-m", "leret", *map(str, train)]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks/sharded_on_cpu"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.count("trained ")) == (0, 1), done.stderr
    assert done.stderr.count("sharded by DistributedType.FSDP") >= 2
    logs = [json.loads((run.policies / n / "training.json").read_text())["log_history"] for n in ("one", "two")]
    one, two = ([entry["loss"] for entry in log] for log in logs)
    assert len(one) == 3
    # Sums over fewer rows round differently; on one kind of processor, the difference is 2e-5 after two updates.
    assert two == pytest.approx(one, rel=1e-4)


def test_a_training_is_launched_with_an_accelerate_configuration(tmp_path, monkeypatch):
    Run.create(tmp_path / "r").update(sampling={"data": {}})
    launched = []
    monkeypatch.setattr("leret.cli.run._run_launcher", lambda command: launched.append(command) or 3)
    monkeypatch.setattr("leret.training.stage.estimate", lambda *_: None)
    training = ["train", "training/ipo.yaml", "--run", str(tmp_path / "r"), "--set=beta=0.1"]
    start, train = [sys.executable, "-m", "leret.training.processes"], ["-m", "leret", "--debug", *training]
    for config, options in (("fsdp", ["--config_file", f"{ROOT}/training/accelerate/fsdp.yaml"]), ("accelerate", [])):
        assert leret(*training, "--launch", config, "--debug")[0] == 3
        assert launched.pop() == [*start, *options, *train]
    out = refused(*training, "--launch", "fsdp3")
    assert "choose a file, fsdp, multi, single, zero3, or accelerate" in " ".join(out.split())


def test_a_launcher_receives_a_signal_and_gets_time_to_stop(tmp_path):
    waits = "import os, pathlib, signal, sys; signal.signal(15, lambda *_: sys.exit(os.getpid() == os.getpgrp()))"
    waits += f"; pathlib.Path({str(tmp_path / 'ready')!r}).touch(); signal.pause()"
    parent = f"from leret.cli.run import _run_launcher; import sys; _run_launcher([sys.executable, '-c', {waits!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]


def test_errors_of_a_recipe_are_printed_before_processes_start(tmp_path, policy, monkeypatch):
    run = sampled_run(tmp_path / "r", policy)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    out = refused("train", "sft", "--run", run.path, "--set", "init_from=nope", "--launch", "multi")
    assert out.count("init_from: 'nope'") == 1
    out = refused("train", "training/pqn.yaml", "--run", run.path, "--launch", "multi")
    assert "algorithm: pqn trains a picker in one process" in " ".join(out.split())
