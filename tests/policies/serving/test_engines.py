"""The command line of each engine, against the options that it documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.policies.serving.engines import Listening, has_gpu
from leret.policies.serving.launch import plan
from leret.policies.serving.model import ServedModel

NAME, LORA = "ipo-1a2b3c4d", "/runs/r/policies/ipo"
FULL = ServedModel(NAME, "/models/ipo")
ADAPTER = ServedModel(NAME, "/models/llama", Path(LORA), Path(LORA), 24)
NOWHERE = {"PATH": "/nowhere"}

AT = "--host 127.0.0.1 --port 8123"
VLLM = f"vllm serve {{}} {AT} --generation-config vllm --disable-uvicorn-access-log --served-model-name {{}}"
VLLM_CPU = " --dtype float32 --enforce-eager --no-enable-chunked-prefill"
# 32 is the smallest of the ranks that vLLM takes which is at least 24.
VLLM_LORA = f" --enable-lora --max-lora-rank 32 --lora-modules {NAME}={LORA} --tokenizer {LORA}"
SGLANG = (
    f"sglang serve --model-path {{}} {AT} --sampling-defaults openai --log-level-http warning --served-model-name {{}}"
)
SGLANG_LORA = f" --enable-lora --lora-paths {NAME}={LORA} --tokenizer-path {LORA}"
TGI = "text-generation-launcher --model-id {} --hostname 127.0.0.1 --port 8123 --max-best-of 64"


@pytest.mark.parametrize(
    ("engine", "served", "gpu", "command", "model"),
    [
        ("vllm", FULL, True, VLLM.format("/models/ipo", NAME), NAME),
        ("vllm", FULL, False, VLLM.format("/models/ipo", NAME) + VLLM_CPU, NAME),
        ("vllm", ADAPTER, True, VLLM.format("/models/llama", f"{NAME}-base") + VLLM_LORA, NAME),
        ("sglang", FULL, True, SGLANG.format("/models/ipo", NAME), NAME),
        (
            "sglang",
            ADAPTER,
            False,
            SGLANG.format("/models/llama", f"{NAME}-base") + SGLANG_LORA + " --device cpu",
            f"{NAME}-base:{NAME}",
        ),
        ("tgi", FULL, True, TGI.format("/models/ipo"), NAME),
        ("tgi", ADAPTER, False, TGI.format("/runs/r/policies/.ipo-merged"), NAME),
    ],
)
def test_the_command_line(
    engine: str, served: ServedModel, gpu: bool, command: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leret.policies.serving.launch.has_gpu", lambda environment: gpu)
    made = plan(served, engine, Listening("127.0.0.1", 8123), dry=True, environment=NOWHERE)
    assert (" ".join(made.command), made.model) == (command, model)
    assert made.recipe == f'policy: {{kind: openai, urls: ["http://127.0.0.1:8123/v1"], model: "{model}"}}'


def test_a_python_starts_sglang_as_a_module() -> None:
    at = Listening("127.0.0.1", 8123)
    made = plan(FULL, "sglang", at, executable="/venv/bin/python3", dry=True, environment=NOWHERE)
    assert made.command[:4] == ("/venv/bin/python3", "-m", "sglang.launch_server", "--model-path")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("node7", "http://node7:80"),
    ],
)
def test_the_url_for_clients_of_this_machine(host: str, url: str) -> None:
    assert Listening(host, 80).url == url


def test_a_gpu_is_seen_by_its_device_file_unless_it_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu({}, tmp_path)
    assert has_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
