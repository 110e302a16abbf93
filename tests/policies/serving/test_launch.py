import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from leret.cli.app import app
from leret.config.policy import PolicySettings
from leret.core import yaml
from leret.core.errors import ConfigError
from leret.http.endpoints import Listening
from leret.policies.serving import launch
from leret.policies.serving.launch import plan, run_server
from leret.policies.serving.model import ServedModel
from tests.policies.serving.conftest import gone


def dry(*extra, weights="/m", **environment):
    environment = {"PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": ""} | environment
    at = Listening("127.0.0.1", 8123)
    return plan(ServedModel("m", weights), "vllm", at, extra=extra, environment=environment)


def test_the_users_arguments_win_except_those_that_leret_sets():
    command = dry("--dtype=bfloat16", "--generation-config", "auto").command
    assert command[-3:] == ("--dtype=bfloat16", "--generation-config", "auto")
    assert [command.count(flag) for flag in ("--dtype", "--generation-config", "--enforce-eager")] == [0, 1, 1]
    line = dry(VLLM_CPU_KVCACHE_SPACE="4").line
    assert line.startswith("HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=4 VLLM_NO_USAGE_STATS=1 vllm serve ")
    assert "HF_HUB_OFFLINE" not in dry(weights="a/b").environment  # a repository of the hub may be fetched
    for argument in ("--port=1", "-p", "--served-model-name"):
        with pytest.raises(ConfigError, match="leret sets this option; use"):
            dry(argument)


def test_a_taken_port_is_refused_before_anything_starts(serve):
    planned = plan(ServedModel("m", "/m"), "vllm", Listening("127.0.0.1", serve.port), executable=str(serve.executable))
    refused = pytest.raises(ConfigError, match=f"port {serve.port} is in use on 127.0.0.1")
    with socket.create_server(("127.0.0.1", serve.port)), refused, run_server(planned):
        raise AssertionError("it was started")
    assert not serve.record.exists()


def served(serve):
    serve.wait_for("policy: {")
    settings = PolicySettings.model_validate(yaml.load(serve.out.splitlines()[-1])["policy"])
    with urllib.request.urlopen(f"{settings.urls[0]}/models", timeout=5) as reply:
        assert [entry["id"] for entry in json.load(reply)["data"]] == [settings.model]
    return settings


def test_a_server_is_warmed_stopped_and_its_key_hidden(serve, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    log = tmp_path / "logs" / "server.log"
    arguments = ["--executable", serve.executable, "--port", "0", "--log", log, "--api-key-env", "MY_KEY"]
    serve.start("demo", *arguments, "--", "--max-model-len", "512", CUDA_VISIBLE_DEVICES="", MY_KEY="s3cret-key")
    settings = served(serve)
    assert (settings.kind, settings.api_key_env) == ("openai", "MY_KEY")
    assert serve.end(signal.SIGTERM) == 0, serve.err
    assert gone(serve.recorded("pids.json"))
    start, warm = serve.recorded("start.json"), serve.recorded("request.json")
    with socket.create_server(("127.0.0.1", urlsplit(settings.urls[0]).port)):
        pass  # the port is free
    assert start["environment"] == {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": "s3cret-key"}
    command = " ".join(start["arguments"])
    assert all(flag in command for flag in ("--host 127.0.0.1", "--dtype float32", "--enforce-eager"))
    assert command.endswith("--max-model-len 512")
    assert serve.out.splitlines()[0].endswith(command)
    assert (warm["body"]["model"], warm["key"]) == (settings.model, "Bearer s3cret-key")
    assert "listening" in log.read_text()
    assert "s3cret-key" not in serve.out + serve.err + command


def test_an_interrupted_start_in_the_background_stops_the_server(monkeypatch, llama_dir):
    ended = threading.Event()

    @contextmanager
    def server(plan, timeout_s):
        yield
        ended.set()

    class Interrupted(Future):
        def result(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_server", server)
    monkeypatch.setattr(launch, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.BackgroundServer(str(llama_dir), "vllm")
    assert ended.wait(10)


def test_a_server_that_dies_later_ends_the_command(serve):
    serve.start("demo", *serve.flags)
    assert served(serve).urls == (f"http://127.0.0.1:{serve.port}/v1",)
    os.kill(serve.recorded("pids.json")[0], signal.SIGKILL)
    assert serve.end() == 1
    assert "killed by signal 9" in serve.err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_leret(serve, stop):
    if stop == signal.SIGKILL and not sys.platform.startswith("linux"):
        pytest.skip("prctl is Linux's")
    serve.start("demo", *serve.flags, mode="silent")
    pids = serve.recorded("pids.json")
    # -2, which a shell shows as 130: Python ends so if the signal came while a module made a dataclass
    assert serve.end(stop) in ({130, -2} if stop == signal.SIGINT else {-9})
    assert ("stopped (SIGINT)" in serve.err) is (stop == signal.SIGINT)
    assert gone(pids)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ("demo --port 0", {"PATH": "/nowhere"}, "cannot open vllm (No such file or directory); install it: `pip"),
        (f"demo --port 0 --executable {__file__}", {}, "(Permission denied); install it"),
        ("/no/such/policy", {}, "policy /no/such/policy does not exist"),
        ("demo --name a:b", {}, "--name 'a:b'"),
    ],
)
def test_a_usage_error_is_one_line(arguments, environment, says, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["serve", "policy", *arguments.split()])
    assert (result.exit_code, result.output.count("error:")) == (2, 1)
    assert says in " ".join(result.output.split())
