from pathlib import Path

import pytest

from leret.core.errors import ConfigError
from leret.http.endpoints import Listening
from leret.policies.serving.engines import has_gpu
from leret.policies.serving.launch import plan
from leret.policies.serving.model import ServedModel

NAME, LORA = "ipo-1a2b3c4d", "/runs/r/policies/ipo"
FULL, MODEL = ServedModel(NAME, "/models/ipo"), "/models/ipo"
ADAPTER, BASE = ServedModel(NAME, "/models/llama", Path(LORA), Path(LORA), 24), ("/models/llama", f"{NAME}-base")

AT = "--host 127.0.0.1 --port 8123"
VLLM = f"vllm serve {{}} {AT} --generation-config vllm --disable-uvicorn-access-log --served-model-name {{}}"
VLLM_CPU = " --dtype float32 --enforce-eager --no-enable-chunked-prefill"
# 32 is the smallest of the ranks that vLLM takes which is at least 24.
VLLM_LORA = f" --enable-lora --max-lora-rank 32 --lora-modules {NAME}={LORA} --tokenizer {LORA}"
TGI = "text-generation-launcher --model-id {} --hostname 127.0.0.1 --port 8123"


def planned(served, engine, executable=None):
    at = Listening("127.0.0.1", 8123)
    return plan(served, engine, at, executable=executable, environment={"PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("engine", "served", "gpu", "command"),
    [
        ("vllm", FULL, True, VLLM.format(MODEL, NAME)),
        ("vllm", FULL, False, VLLM.format(MODEL, NAME) + VLLM_CPU),
        ("vllm", ADAPTER, True, VLLM.format(*BASE) + VLLM_LORA),
        ("tgi", FULL, True, TGI.format(MODEL)),
    ],
)
def test_the_command_line(engine, served, gpu, command, monkeypatch):
    monkeypatch.setattr("leret.policies.serving.launch.has_gpu", lambda environment: gpu)
    result = planned(served, engine)
    assert " ".join(result.command) == command
    assert result.settings.model == NAME
    assert result.recipe == f'policy: {{kind: openai, urls: ["http://127.0.0.1:8123/v1"], model: "{NAME}"}}'


def test_tgi_takes_an_adapter_only_merged():
    with pytest.raises(ConfigError, match=f"leret merge {LORA} --out DIR"):
        planned(ADAPTER, "tgi")


def test_a_gpu_is_detected_unless_hidden(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    visible = [has_gpu({"CUDA_VISIBLE_DEVICES": devices}, tmp_path) for devices in ("0", "")]
    assert (has_gpu({}, tmp_path), visible) == (True, [True, False])
