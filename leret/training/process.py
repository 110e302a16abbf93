"""The process around a training: threads, environment, what libraries print. All of it is put back afterwards."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK = ("No space left", "PytorchStreamWriter", "unexpected pos", "iostream error", "File too large", "os error 28")


@contextmanager
def surroundings(directory: Path, threads: int | None) -> Iterator[None]:
    """One thread for equal bits, logs beside the checkpoints, and quiet libraries.

    Args:
        directory: of the trainer; TensorBoard and W&B write in its ``logs`` unless the environment says otherwise.
        threads: of torch on the CPU; None leaves it.
    """
    import datasets
    import torch
    import transformers

    from leret.training.thrift import compact_heads

    before = torch.get_num_threads()
    shown = not datasets.are_progress_bars_disabled(), transformers.logging.is_progress_bar_enabled()
    verbosity = transformers.logging.get_verbosity()
    environment = {
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TENSORBOARD_LOGGING_DIR": str(directory / "logs"),
        "WANDB_DIR": str(directory / "logs"),
    }
    with _environment(environment), warnings.catch_warnings(), compact_heads():
        warnings.simplefilter("ignore", FutureWarning)
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            transformers.logging.set_verbosity(verbosity)
            if shown[0]:
                datasets.enable_progress_bars()
            if shown[1]:
                transformers.logging.enable_progress_bar()


@contextmanager
def storing() -> Iterator[None]:
    """Libraries report a full disk each in its own way; here all of them are an OSError.

    Raises:
        OSError: of ENOSPC, where a library could not write.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if any(sign in str(error) for sign in _DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
