import gc
import itertools
import signal
import sys
from pathlib import Path

import pytest

from leret.core.memory import _YOUNG

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a shell; Ctrl-C is tested here
    signal.signal(signal.SIGINT, signal.default_int_handler)

_N_MODULES = pytest.StashKey[int]()


def collect_rarely():
    """Do what `gc_frozen` does: a full collection of the imported libraries takes half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)


def pytest_runtest_teardown(item):
    if len(sys.modules) > item.session.stash.setdefault(_N_MODULES, 0) + 100:
        item.session.stash[_N_MODULES] = len(sys.modules)
        collect_rarely()


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    # not `mktemp`, which lists all directories of the session: milliseconds a test
    monkeypatch.setenv("LERET_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "caches" / str(next(_numbers))))


@pytest.fixture(scope="session")
def shared_data():
    """The real data beside the checkout; tests that need it are skipped where it is absent."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: this test compares with published figures on it")
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The directory of a real LM; tests that need it are skipped where `make smollm2` has not built it."""
    folder = Path(__file__).resolve().parents[1] / "policies" / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no real LM at {folder}: build it with `make smollm2`")
    return folder
