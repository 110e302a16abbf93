"""A server that fails in the ways real ones do, and `leret serve policy` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leret.cli import app
from leret.config.policy import PolicySettings
from leret.core import yaml
from leret.core.errors import ConfigError, PolicyError
from leret.policies.serving.engines import Listening
from leret.policies.serving.launch import plan, started
from leret.policies.serving.model import ServedModel
from tests.policies.serving.conftest import Serve, gone

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")


def flags(serve: Serve, *more: str) -> list[str]:
    return ["--executable", str(serve.executable), "--port", str(serve.port), *more]


def served(reply: str) -> PolicySettings:
    """The policy that a recipe gets from the command's last line."""
    return PolicySettings.model_validate(yaml.load(reply.splitlines()[-1])["policy"])


def no_listener(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGHUP])
def test_a_server_is_started_warmed_named_and_stopped(serve: Serve, tmp_path: Path, stop: signal.Signals) -> None:
    log = tmp_path / "logs" / "server.log"
    serve.start("demo", *flags(serve, "--log", str(log)), "--", "--max-model-len", "512")
    serve.wait_for("policy: {")
    settings = served(serve.out)
    assert settings.kind == "openai"
    assert settings.urls == (f"http://127.0.0.1:{serve.port}/v1",)
    with urllib.request.urlopen(f"{settings.urls[0]}/models", timeout=5) as reply:
        assert [entry["id"] for entry in json.load(reply)["data"]] == [settings.model]
    (warm,) = serve.requests()
    assert warm["body"]["model"] == settings.model
    assert warm["key"] is None

    assert serve.end(stop) == 0, serve.err
    assert gone(serve.recorded("pids.json"))
    assert no_listener(serve.port)
    assert "listening" in log.read_text()
    shown = serve.out.splitlines()[0]
    assert shown.endswith(" ".join(serve.recorded("start.json")["arguments"]))
    assert shown.endswith("--max-model-len 512")


def test_free_port_loopback_offline_cpu_defaults_and_a_key_that_is_never_shown(serve: Serve) -> None:
    for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"):
        serve.environment.pop(name, None)
    arguments = ["--executable", serve.executable, "--port", "0", "--api-key-env", "MY_KEY"]
    serve.start("demo", *arguments, CUDA_VISIBLE_DEVICES="", MY_KEY="s3cret-key")
    serve.wait_for("policy: {")
    settings = served(serve.out)
    assert settings.api_key_env == "MY_KEY"
    with urllib.request.urlopen(f"{settings.urls[0]}/models", timeout=5) as reply:
        assert reply.status == 200
    assert serve.end(signal.SIGTERM) == 0
    start = serve.recorded("start.json")
    cpu = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": "s3cret-key"}
    assert start["environment"] == cpu
    command = " ".join(start["arguments"])
    for flag in ("--host 127.0.0.1", "--dtype float32", "--enforce-eager"):
        assert flag in command
    assert serve.requests()[0]["key"] == "Bearer s3cret-key"
    assert "s3cret-key" not in serve.out + serve.err + command


FAULTS = {
    "dies at start": (5, ["exited with code 3", "RuntimeError: not enough memory for the KV cache"]),
    "never healthy": (1, ["/health answers 503 after 1 s"]),
    "silent": (1, ["/health does not answer after 1 s"]),
    "another server": (5, ["serves somebody-elses and not mine"]),
    "cannot complete": (5, ["head_dim=16 is not supported (Bearer [key])", "refused Bearer [key]"]),
    "dies of a completion": (5, ["exited with code 7", "RuntimeError: no such kernel"]),
}


@pytest.mark.parametrize("mode", FAULTS)
def test_a_server_that_fails_is_stopped_and_told_with_its_last_words(
    serve: Serve, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FAKE_ENGINE": mode, "FAKE_RECORD": str(serve.record), "K": "s3cret-key"}.items():
        monkeypatch.setenv(name, value)
    at, executable = Listening("127.0.0.1", serve.port), str(serve.executable)
    planned = plan(ServedModel("mine", "/m"), "vllm", at, executable=executable, api_key_env="K")
    timeout_s, says = FAULTS[mode]
    told: list[str] = []
    log = serve.record.parent / "log"
    with pytest.raises(PolicyError) as caught, started(planned, timeout_s=timeout_s, log=log, tell=told.append):
        raise AssertionError("it was called ready")
    assert all(text in str(caught.value) for text in says), str(caught.value)
    assert "s3cret-key" not in f"{caught.value} {told}"
    pids = serve.record / "pids.json"
    assert gone(json.loads(pids.read_text()) if pids.is_file() else [])


def test_a_taken_port_is_refused_before_anything_starts(serve: Serve) -> None:
    planned = plan(ServedModel("m", "/m"), "vllm", Listening("127.0.0.1", serve.port), executable=str(serve.executable))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", serve.port))
        holder.listen()
        with pytest.raises(ConfigError, match=f"port {serve.port} of 127.0.0.1 is taken"), started(planned):
            raise AssertionError("it was started")
    assert not serve.record.exists()


def test_a_server_that_dies_later_ends_the_command(serve: Serve) -> None:
    serve.start("demo", *flags(serve))
    serve.wait_for("policy: {")
    (pid,) = serve.recorded("pids.json")
    os.kill(pid, signal.SIGKILL)
    assert serve.end() == 1
    assert "ended by itself with code -9" in serve.err


def test_a_server_that_ignores_the_end_is_killed_with_its_children(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "stubborn")
    monkeypatch.setenv("FAKE_RECORD", str(serve.record))
    at, told = Listening("127.0.0.1", serve.port), []
    planned = plan(ServedModel("m", "/m"), "vllm", at, executable=str(serve.executable))
    with started(planned, grace_s=0.5, log=serve.record.parent / "log", tell=told.append):
        pids = serve.recorded("pids.json")
    assert len(pids) == 2
    assert "did not end within 0.5 s and was killed" in told[-1]
    assert gone(pids)


def test_ctrl_c_while_it_starts_leaves_nothing_running(serve: Serve) -> None:
    serve.start("demo", *flags(serve), mode="silent")
    pids = serve.recorded("pids.json")
    assert serve.end(signal.SIGINT) == 130
    assert "stopped (SIGINT)" in serve.err
    assert gone(pids)


@linux
def test_the_server_ends_when_leret_is_killed(serve: Serve) -> None:
    serve.start("demo", *flags(serve))
    serve.wait_for("policy: {")
    pids = serve.recorded("pids.json")
    serve.end(signal.SIGKILL)
    assert gone(pids)


def test_print_starts_nothing_and_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(app, ["serve", "policy", "demo", "--engine", "sglang", "--port", "9", "--print"])
    assert result.exit_code == 0
    assert "sglang serve --model-path" in result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["demo"], {"PATH": "/nowhere"}, "vllm is not on PATH; install it (`pip install vllm`"),
        (["demo"], {"LERET_VLLM": "/no/vllm"}, "LERET_VLLM /no/vllm is not there"),
        (["demo", "--executable", __file__], {}, "is there, but cannot be run"),
        (["demo", "--engine", "sglang", "--executable", "/no/x"], {}, "--executable /no/x is not there"),
        (["/no/such/policy"], {}, "there is no policy /no/such/policy"),
        (["demo", "--run", "/no/run"], {}, "/no/run is not a run directory"),
        (["demo", "--name", "a:b"], {}, "--name 'a:b'"),
        (["demo", "--executable", "/bin/true", "--", "--port", "1"], {}, "give it before the --, as --port"),
        (["demo", "--executable", "/bin/true", "--api-key-env", "NOT_SET"], {}, "NOT_SET"),
        (["demo", "--executable", "/bin/true", "--host", "192.0.2.1"], {}, "--host 192.0.2.1"),
        (["demo", "--engine", "sglang", "--api-key-env", "K", "--print"], {}, "on its command line only"),
    ],
)
def test_a_mistake_is_one_error(
    arguments: list[str], environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["serve", "policy", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert result.output.count("error:") == 1
