"""Inference servers that leret can start: their executables and command lines.

vLLM needs ``--generation-config vllm``. Without it, the server takes settings that a request omits
(``top_k``, ``repetition_penalty``) from the model's generation_config.json, and samples do not come
from the policy's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leret.http.endpoints import Listening
from leret.policies.serving.model import ServedModel

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server that leret can start."""

    name: str
    executable: str  # its name on PATH; the variable LERET_NAME overrides it with a path
    install: str  # instructions for the user
    key_variable: str  # variable from which the server reads its API key
    arguments: Callable[[ServedModel, Listening, bool], list[str]]  # of (model, address, has GPU)
    # defaults; the user's variables take precedence
    environment: Mapping[str, str] = field(default_factory=dict)
    # further defaults without a GPU
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    takes_adapters: bool = True

    @property
    def variable(self) -> str:
        """Name of the environment variable that holds the path of the executable."""
        return f"LERET_{self.name.upper()}"


def _vllm(served: ServedModel, at: Listening, gpu: bool) -> list[str]:
    command = ["serve", served.weights, "--host", at.host, "--port", str(at.port)]
    command += ["--generation-config", "vllm"]
    command += ["--disable-uvicorn-access-log"]  # the access log has one line per request
    if served.adapter is None:
        command += ["--served-model-name", served.name]
    else:
        rank = next((rank for rank in _VLLM_RANKS if rank >= served.rank), served.rank)
        command += ["--served-model-name", f"{served.name}-base"]
        command += ["--enable-lora", "--max-lora-rank", str(rank)]
        command += ["--lora-modules", f"{served.name}={served.adapter}"]
    if served.tokenizer is not None:
        command += ["--tokenizer", str(served.tokenizer)]
    if not gpu:
        # Use float32 like policies in this process. Compilation takes longer than it saves for
        # small models. Chunked prefill rewinds seeded generators, which PyTorch does not support
        # on a CPU: vLLM 0.32.0 exits with "CPU Generator does not use offset".
        command += ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"]
    return command


SERVERS = {
    "vllm": ServerKind(
        "vllm",
        "vllm",
        "`pip install vllm` in a separate environment, or the CPU build of vLLM without a GPU",
        "VLLM_API_KEY",
        _vllm,
        environment={"VLLM_NO_USAGE_STATS": "1"},
        cpu_environment={"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB; the default is half of the memory
    ),
    "tgi": ServerKind(
        "tgi",
        "text-generation-launcher",
        "use the container ghcr.io/huggingface/text-generation-inference",
        "API_KEY",
        lambda served, at, gpu: [
            "--model-id",
            served.weights,
            "--hostname",
            at.host,
            "--port",
            str(at.port),
        ],
        takes_adapters=False,
    ),
}


def has_gpu(environment: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Return whether this process can use an NVIDIA or AMD GPU."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in {"", "-1"}:
        return False
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def without_repeats(command: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return ``command`` without the options that ``extra`` also sets.

    >>> without_repeats(["serve", "--port", "1", "--enforce-eager"], ["--port", "2"])
    ['serve', '--enforce-eager']
    """
    overridden = {argument.split("=", 1)[0] for argument in extra if argument.startswith("--")}
    remaining: list[str] = []
    dropping = False
    for argument in command:
        if argument.startswith("--"):
            dropping = argument in overridden
        if not dropping:
            remaining.append(argument)
    return remaining
