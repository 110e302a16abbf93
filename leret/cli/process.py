"""The process that a command runs in: quiet libraries, no caches in the home directory, memory kept."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import warnings

from leret.cli.console import plain
from leret.core.memory import tune_malloc

_DEFAULTS = {
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch its price list on import
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Of the last 1,024 shapes of bfloat16 PyTorch keeps kernels and buffers: some gigabytes, where no two are equal."""
_LOUD = ("LiteLLM", "accelerate", "bm25s", "datasets", "dspy", "httpx", "matplotlib", "numba", "transformers", "trl")


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))  # a warning may quote a server


def prepare(debug: bool) -> None:
    """Set up the process; what the environment already says is left alone.

    Args:
        debug: let libraries log and warn.
    """
    tune_malloc()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())
    for name, value in _DEFAULTS.items():
        if not debug or name.startswith("LITELLM"):
            os.environ.setdefault(name, value)
    for name in _SHAPES:
        os.environ.setdefault(name, "64")
    if "DSPY_CACHEDIR" not in os.environ:
        # DSPy opens a cache as soon as it is asked for one; leret samples without, so it gets a place that goes away.
        os.environ["DSPY_CACHEDIR"] = directory = tempfile.mkdtemp(prefix="leret-dspy-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if not debug:
        warnings.simplefilter("ignore")
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.ERROR)
