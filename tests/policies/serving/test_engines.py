"""The command line of each engine, against the options that it documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.core.errors import ConfigError
from leret.policies.serving.engines import Listening, has_gpu, without_repeats
from leret.policies.serving.launch import ServerPlan, plan
from leret.policies.serving.model import ServedModel

FULL = ServedModel("ipo-1a2b3c4d", "/models/ipo")
ADAPTER = ServedModel("ipo-1a2b3c4d", "/models/llama", Path("/runs/r/policies/ipo"), Path("/runs/r/policies/ipo"), 24)
AT = Listening("127.0.0.1", 8123)
DEVICES = {"gpu": {}, "cpu": {"CUDA_VISIBLE_DEVICES": ""}}


def planned(served: ServedModel, engine: str, device: str, monkeypatch: pytest.MonkeyPatch, *extra: str) -> ServerPlan:
    monkeypatch.setattr("leret.policies.serving.launch.has_gpu", lambda environment: device == "gpu")
    return plan(served, engine, AT, extra=extra, dry=True, environment={"PATH": "/nowhere"})


VLLM = "vllm serve {} --host 127.0.0.1 --port 8123 --generation-config vllm --disable-uvicorn-access-log"
SGLANG = "sglang serve --model-path {} --host 127.0.0.1 --port 8123 --sampling-defaults openai --log-level-http warning"
TGI = "text-generation-launcher --model-id {} --hostname 127.0.0.1 --port 8123 --max-best-of 64"
LORA = "/runs/r/policies/ipo"


@pytest.mark.parametrize(
    ("engine", "served", "device", "command", "model"),
    [
        ("vllm", FULL, "gpu", VLLM.format("/models/ipo") + " --served-model-name ipo-1a2b3c4d", "ipo-1a2b3c4d"),
        (
            "vllm",
            FULL,
            "cpu",
            VLLM.format("/models/ipo") + " --served-model-name ipo-1a2b3c4d --dtype float32 --enforce-eager "
            "--no-enable-chunked-prefill",
            "ipo-1a2b3c4d",
        ),
        (
            "vllm",
            ADAPTER,
            "gpu",
            # 32 is the smallest of the ranks that vLLM takes which is at least 24.
            VLLM.format("/models/llama")
            + " --served-model-name ipo-1a2b3c4d-base --enable-lora --max-lora-rank 32"
            + f" --lora-modules ipo-1a2b3c4d={LORA} --tokenizer {LORA}",
            "ipo-1a2b3c4d",
        ),
        ("sglang", FULL, "gpu", SGLANG.format("/models/ipo") + " --served-model-name ipo-1a2b3c4d", "ipo-1a2b3c4d"),
        (
            "sglang",
            ADAPTER,
            "cpu",
            SGLANG.format("/models/llama")
            + f" --served-model-name ipo-1a2b3c4d-base --enable-lora --lora-paths ipo-1a2b3c4d={LORA}"
            + f" --tokenizer-path {LORA} --device cpu",
            "ipo-1a2b3c4d-base:ipo-1a2b3c4d",
        ),
        ("tgi", FULL, "gpu", TGI.format("/models/ipo"), "ipo-1a2b3c4d"),
        ("tgi", ADAPTER, "cpu", TGI.format("/runs/r/policies/.ipo-merged"), "ipo-1a2b3c4d"),
    ],
)
def test_the_command_line(
    engine: str, served: ServedModel, device: str, command: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(served, engine, device, monkeypatch)
    assert " ".join(made.command) == command
    assert made.model == model
    assert made.recipe == f'policy: {{kind: openai, urls: ["http://127.0.0.1:8123/v1"], model: "{model}"}}'


def test_a_python_starts_sglang_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(FULL, "sglang", AT, executable="/venv/bin/python3", dry=True, environment={"PATH": "/nowhere"})
    assert made.command[:4] == ("/venv/bin/python3", "-m", "sglang.launch_server", "--model-path")


def test_the_users_arguments_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(FULL, "vllm", "cpu", monkeypatch, "--dtype=bfloat16", "--generation-config", "auto")
    assert made.command.count("--enforce-eager") == 1
    assert "--dtype" not in made.command
    assert made.command[-3:] == ("--dtype=bfloat16", "--generation-config", "auto")
    assert made.command.count("--generation-config") == 1


def test_a_flag_without_a_value_is_left_out_alone() -> None:
    assert without_repeats(["serve", "m", "--enforce-eager", "--dtype", "float32"], ["--enforce-eager"]) == [
        "serve",
        "m",
        "--dtype",
        "float32",
    ]


@pytest.mark.parametrize("argument", ["--port", "--port=1", "-p", "--host", "--hostname=x", "--served-model-name"])
def test_what_leret_has_to_know_is_refused_among_the_engines_arguments(argument: str) -> None:
    with pytest.raises(ConfigError, match="leret has to know it too"):
        plan(FULL, "vllm", AT, extra=[argument], dry=True, environment={})


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leret.policies.serving.launch.has_gpu", lambda environment: False)
    made = plan(FULL, "vllm", AT, dry=True, environment={"PATH": "/nowhere", "VLLM_CPU_KVCACHE_SPACE": "4"})
    assert made.environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert made.line.startswith("HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=4 VLLM_NO_USAGE_STATS=1 vllm serve ")


def test_a_hub_repository_may_be_fetched() -> None:
    made = plan(ServedModel("a/b", "a/b"), "vllm", AT, dry=True, environment={"PATH": "/nowhere"})
    assert "HF_HUB_OFFLINE" not in made.environment


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("node7", "http://node7:80"),
    ],
)
def test_the_url_for_clients_here(host: str, url: str) -> None:
    assert Listening(host, 80).url == url


def test_a_gpu_is_seen_by_its_device_file_unless_it_is_hidden(tmp_path: Path) -> None:
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu({}, tmp_path)
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert has_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
