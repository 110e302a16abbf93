"""Tune glibc's malloc and Python's garbage collector: small models train 1.5 to 3 times as fast on CPUs.

By default, glibc returns freed blocks to the kernel, so page faults take most of a tiny model's training time.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# options of mallopt(3)
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_GIB = 1 << 30
# New objects per young collection. With Python's default of 700, sampling spends a tenth of its time collecting.
_YOUNG = 20_000


def tune_malloc() -> bool:
    """Let this process keep freed memory. Return False without glibc or if a ``MALLOC_*`` variable is set."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it; other libraries raise here
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    thresholds = {_MMAP_THRESHOLD: _GIB, _TRIM_THRESHOLD: _GIB, _TOP_PAD: _GIB // 4}
    return all(mallopt(name, value) for name, value in thresholds.items())


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection and collect less often in the block. Blocks may nest."""
    thresholds = gc.get_threshold()
    # not `gc.get_freeze_count`, which counts a million objects of imported libraries one by one
    if thresholds[0] == _YOUNG:
        yield
        return
    gc.freeze()
    gc.set_threshold(_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
