"""colbert-ai 0.2.22 as a library.

On its own it forces multiprocessing's start method, prints to standard output, seeds all generators, writes to the
environment, compiles C++ in a folder that other libraries overwrite, waits forever for the lock of a killed compiler,
and cannot load a checkpoint with transformers 5. All uses go through `library`, which restores the process, keeps the
compiler's folder, and makes checkpoints load.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from filelock import FileLock

from leret.core.errors import MissingDependency, RetrievalError, reason
from leret.core.files import cache_directory

_LOCK = threading.RLock()  # colbert-ai has global configuration
_EXTENSIONS = (
    ("colbert.modeling.colbert", "ColBERT", "segmented_maxsim_cpp"),
    ("colbert.search.index_storage", "IndexScorer", "filter_pids_cpp"),
    ("colbert.search.index_storage", "IndexScorer", "decompress_residuals_cpp"),
    ("colbert.search.strided_tensor", "StridedTensor", "segmented_lookup_cpp"),
)
_FACTORIES = ("base_colbert", "tokenization.query_tokenization", "tokenization.doc_tokenization")

_log = logging.getLogger(__name__)


@contextmanager
def library() -> Iterator[SimpleNamespace]:
    """Hold the lock and yield colbert-ai's classes; restore the process afterwards."""
    with _LOCK, _restored():
        modules = _imported()
        _compiled(modules)
        yield SimpleNamespace(
            Checkpoint=modules["colbert.modeling.checkpoint"].Checkpoint,
            ColBERTConfig=modules["colbert.infra.config"].ColBERTConfig,
            IndexScorer=modules["colbert.search.index_storage"].IndexScorer,
            Run=modules["colbert.infra.run"].Run,
            indexer=_indexer,
        )


def extensions_directory() -> Path:
    """Return the folder of compiled extensions for these versions, shared with no other library."""
    import torch

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = Path(root) if root else cache_directory() / "torch_extensions"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return base / f"colbert-{version('colbert-ai')}-torch-{torch.__version__.split('+')[0]}-{python}"


@contextmanager
def _restored() -> Iterator[None]:
    import numpy as np
    import torch
    from huggingface_hub import constants

    method = multiprocessing.get_start_method(allow_none=True)
    seeds = random.getstate(), np.random.get_state()
    offline = patch.object(constants, "HF_HUB_OFFLINE", True)  # models are directories
    try:
        with warnings.catch_warnings(), patch.dict(os.environ), offline, torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # from torch.cuda.amp, at each call
            yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])


def _imported() -> dict[str, Any]:
    """Import the library's modules, silence them, and make them load checkpoints with transformers 5."""
    wanted = [
        "colbert.modeling.checkpoint",
        "colbert.indexing.collection_indexer",
        "colbert.infra.config",
        "colbert.infra.run",
        *(module for module, _, _ in _EXTENSIONS),
    ]
    try:
        modules = {name: importlib.import_module(name) for name in wanted}
    except ImportError as error:
        if (error.name or "").partition(".")[0] in {"colbert", "faiss", "ujson", "git", "bitarray", "ninja"}:
            raise MissingDependency("colbert-ai", "colbert") from error
        raise
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "colbert" and module is not None:
            vars(module)["print"] = _quiet
    for name in ("colbert.search.index_loader", "colbert.indexing.collection_indexer"):
        vars(sys.modules[name])["tqdm"] = SimpleNamespace(tqdm=lambda items, **_: items)
    vars(modules["colbert.indexing.collection_indexer"])["compute_faiss_kmeans"] = _centroids
    for name in ("hf_colbert", "base_colbert"):
        module = importlib.import_module(f"colbert.modeling.{name}")
        for loader in {"AutoConfig", "AutoTokenizer"} & vars(module).keys():
            vars(module)[loader] = _without_code(loader)
    for name in _FACTORIES:
        module = importlib.import_module(f"colbert.modeling.{name}")
        if not hasattr(module.class_factory, "wrapped"):
            vars(module)["class_factory"] = _compatible(module.class_factory)
    return modules


def _without_code(loader: str) -> Any:
    import transformers

    load = getattr(transformers, loader).from_pretrained
    return SimpleNamespace(from_pretrained=lambda name, **options: load(name, **options | {"trust_remote_code": False}))


def _compatible(factory: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a class factory with classes that transformers 5 can load."""

    def make(name: str) -> Any:
        model = factory(name)
        model.all_tied_weights_keys = {}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ())
        return model

    make.wrapped = factory  # type: ignore[attr-defined]
    return make


def _indexer(config: Any, texts: list[str], checkpoint: Any) -> Any:
    module = sys.modules["colbert.indexing.collection_indexer"]
    with patch.object(module, "Checkpoint", lambda *_, **__: checkpoint):
        return vars(module)["CollectionIndexer"](config=config, collection=texts, verbose=0)


def _centroids(n_dimensions: int, n_centroids: int, n_iterations: int, shared: Any, queue: Any = None) -> Any:
    import faiss
    import torch

    points = shared[0][0].float().numpy()
    if len(points) < n_centroids:
        raise RetrievalError(f"{len(points)} tokens are too few for ColBERT's {n_centroids} centroids; index more")
    kmeans = faiss.Kmeans(
        n_dimensions, n_centroids, niter=n_iterations, gpu=torch.cuda.is_available(), verbose=False, seed=123
    )
    kmeans.cp.min_points_per_centroid = 1  # no warning from C++
    kmeans.train(points)
    return torch.from_numpy(kmeans.centroids)


def _compiled(modules: dict[str, Any]) -> None:
    import torch

    if torch.cuda.is_available() or all(
        hasattr(getattr(modules[module], name), "loaded_extensions") for module, name, _ in _EXTENSIONS
    ):
        return
    directory = extensions_directory()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "leret.lock"):  # under it, torch's locks are left over from killed compilers
            for stale in directory.glob("*/lock"):
                stale.unlink(missing_ok=True)
            if not all((directory / extension / f"{extension}.so").exists() for _, _, extension in _EXTENSIONS):
                _log.warning("compiling ColBERT's C++ extensions in %s: once, for a minute or two", directory)
            for module, name, _ in _EXTENSIONS:
                getattr(modules[module], name).try_load_torch_extensions(False)
    except (OSError, RuntimeError, ImportError) as error:
        raise RetrievalError(
            f"ColBERT's C++ extensions cannot be compiled in {directory} ({reason(error)}); they need g++, "
            "ninja and a writable directory (TORCH_EXTENSIONS_DIR names another)"
        ).failed() from error


def _quiet(*values: Any, **options: Any) -> None:
    """Log instead of printing; replaces ``print`` in the library's modules."""
    _log.debug("%s", " ".join(map(str, values)))
