import gc
import os
import platform
import subprocess
import sys

import pytest

from leret.core.memory import gc_frozen
from tests.conftest import collect_rarely

GAPS = """
from pathlib import Path
import ctypes
from leret.core.memory import tune_malloc
import numpy as np
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
assert tune_malloc()
held = [np.ones(1 << 17) for _ in range(200)]  # a MB each
del held[::2]
held.append(np.ones(1))
before = resident_mb()
assert ctypes.CDLL(None).malloc_trim(0)
print(before - resident_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_malloc_keeps_free_pages_until_they_are_trimmed():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert int(subprocess.check_output([sys.executable, "-c", GAPS], env=environment)) > 80  # of 100 MB


def test_collector_skips_existing_objects_in_the_block():
    gc.unfreeze()  # the libraries that conftest.py froze
    gc.set_threshold(700, 10, 10)  # Python's
    with gc_frozen():
        assert gc.get_threshold()[0] > 700
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        with gc_frozen():  # in another task, say
            pass
        assert gc.get_freeze_count() > 0.9 * frozen  # other threads may let go of a few
    assert not gc.get_freeze_count()
    assert gc.get_threshold() == (700, 10, 10)
    collect_rarely()
