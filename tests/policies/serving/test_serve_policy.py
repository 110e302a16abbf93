"""`leret serve policy` as a user runs it, with an engine that fails in the ways real ones do."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from leret.config.policy import policy_settings
from leret.core import yaml
from tests.policies.serving.conftest import Serve, gone

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")


def flags(serve: Serve, *more: str) -> list[str]:
    return ["--executable", str(serve.executable), "--port", str(serve.port), *more]


def no_listener(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_is_started_warmed_named_and_stopped(serve: Serve, tmp_path: Path, stop: signal.Signals) -> None:
    log = tmp_path / "logs" / "server.log"
    serve.start("demo", *flags(serve, "--log", str(log)), "--", "--max-model-len", "512")
    serve.wait_for("policy: {")
    settings = policy_settings(yaml.load(serve.out.splitlines()[-1])["policy"])
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


def test_the_server_listens_on_loopback_offline_and_with_the_cpus_defaults(serve: Serve) -> None:
    serve.environment.pop("HF_HUB_OFFLINE", None)
    serve.environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    serve.start("demo", *flags(serve), CUDA_VISIBLE_DEVICES="")
    serve.wait_for("policy: {")
    assert serve.end(signal.SIGTERM) == 0
    start = serve.recorded("start.json")
    assert start["environment"] == {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": None}
    arguments = " ".join(start["arguments"])
    assert "--host 127.0.0.1" in arguments
    assert "--dtype float32" in arguments
    assert "--enforce-eager" in arguments


def test_print_starts_nothing_and_needs_no_engine(serve: Serve) -> None:
    assert serve.run("demo", "--engine", "sglang", "--port", "9", "--print", PATH="/nowhere") == 0
    assert "sglang serve --model-path" in serve.out
    assert not serve.record.exists()


def test_a_server_that_dies_at_start_is_told_with_its_last_words(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve), mode="dies at start") == 1
    assert "exited with code 3" in serve.err
    assert "RuntimeError: not enough memory for the KV cache" in serve.err
    assert serve.err.count("error:") == 1


def test_a_server_that_is_never_healthy_is_stopped_at_the_deadline(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve, "--timeout", "3"), mode="never healthy") == 1
    assert "/health answers 503 after 3 s" in serve.err
    assert gone(serve.recorded("pids.json"))


def test_a_server_that_never_listens_is_stopped_at_the_deadline(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve, "--timeout", "2"), mode="silent") == 1
    assert "/health does not answer after 2 s" in serve.err
    assert gone(serve.recorded("pids.json"))


def test_a_taken_port_is_refused_before_anything_starts(serve: Serve) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", serve.port))
        holder.listen()
        assert serve.run("demo", *flags(serve)) == 2
    assert f"port {serve.port} of 127.0.0.1 is taken" in serve.err
    assert not serve.record.exists()


def test_port_0_takes_a_free_one(serve: Serve) -> None:
    serve.start("demo", "--executable", serve.executable, "--port", "0")
    serve.wait_for("policy: {")
    url = yaml.load(serve.out.splitlines()[-1])["policy"]["urls"][0]
    with urllib.request.urlopen(f"{url}/models", timeout=5) as reply:
        assert reply.status == 200
    assert serve.end(signal.SIGTERM) == 0


def test_another_server_on_the_port_is_not_taken_for_ours(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve), mode="another server") == 2
    assert "serves somebody-elses and not demo-" in serve.err
    assert gone(serve.recorded("pids.json"))


def test_a_server_that_cannot_complete_is_not_called_ready(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve), mode="cannot complete") == 1
    assert "head_dim=16 is not supported" in serve.err
    assert "is served at" not in serve.out
    assert gone(serve.recorded("pids.json"))


def test_a_server_that_dies_of_its_first_completion_is_told_with_its_last_words(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve), mode="dies of a completion") == 1
    assert "exited with code 7" in serve.err
    assert "RuntimeError: no such kernel" in serve.err


def test_a_server_that_dies_later_ends_the_command(serve: Serve) -> None:
    serve.start("demo", *flags(serve))
    serve.wait_for("policy: {")
    (pid,) = serve.recorded("pids.json")
    os.kill(pid, signal.SIGKILL)
    assert serve.end() == 1
    assert "ended by itself with code -9" in serve.err


def test_a_server_that_ignores_the_end_is_killed_with_its_children(serve: Serve) -> None:
    serve.start("demo", *flags(serve, "--grace", "1"), mode="stubborn")
    serve.wait_for("policy: {")
    pids = serve.recorded("pids.json")
    assert len(pids) == 2
    assert serve.end(signal.SIGTERM, timeout_s=30) == 0
    assert "did not end within 1 s and was killed" in serve.err
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


def test_a_key_reaches_server_and_client_and_is_never_shown(serve: Serve, tmp_path: Path) -> None:
    serve.start("demo", *flags(serve, "--api-key-env", "MY_KEY"), MY_KEY="s3cret-key")
    serve.wait_for("policy: {")
    assert yaml.load(serve.out.splitlines()[-1])["policy"]["api_key_env"] == "MY_KEY"
    assert serve.end(signal.SIGTERM) == 0
    start = serve.recorded("start.json")
    assert start["environment"]["VLLM_API_KEY"] == "s3cret-key"
    assert "s3cret-key" not in " ".join(start["arguments"])
    assert serve.requests()[0]["key"] == "Bearer s3cret-key"
    assert "s3cret-key" not in serve.out + serve.err


def test_a_key_that_the_server_repeats_is_not_shown(serve: Serve) -> None:
    assert serve.run("demo", *flags(serve, "--api-key-env", "K"), mode="cannot complete", K="s3cret-key") == 1
    assert "head_dim=16 is not supported (Bearer [key])" in serve.err
    assert "refused Bearer [key]" in serve.err
    assert "s3cret-key" not in serve.out + serve.err


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["demo"], {"PATH": "/nowhere"}, "vllm is not on PATH; install it (`pip install vllm`"),
        (["demo"], {"LERET_VLLM": "/no/vllm"}, "LERET_VLLM /no/vllm is not there"),
        (["demo", "--executable", __file__], {}, "is there, but cannot be run"),
        (["demo", "--engine", "tgi", "--executable", "/no/tgi"], {}, "--executable /no/tgi is not there"),
        (["/no/such/policy"], {}, "there is no policy /no/such/policy"),
        (["demo", "--run", "/no/run"], {}, "/no/run is not a run directory"),
        (["demo", "--name", "a:b"], {}, "--name 'a:b'"),
        (["demo", "--executable", "/bin/true", "--", "--port", "1"], {}, "give it before the --, as --port"),
        (["demo", "--executable", "/bin/true", "--api-key-env", "NOT_SET"], {}, "NOT_SET"),
        (["demo", "--executable", "/bin/true", "--host", "192.0.2.1"], {}, "--host 192.0.2.1"),
        (["demo", "--engine", "sglang", "--api-key-env", "K", "--print"], {}, "on its command line only"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    serve: Serve, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    assert serve.run(*arguments, **environment) == 2, serve.err
    assert says in serve.err
    assert serve.err.count("error:") == 1
    assert "Traceback" not in serve.err
