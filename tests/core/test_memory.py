import gc
import platform

import pytest

from leret.core.memory import gc_frozen, tune_malloc
from tests.conftest import collect_rarely


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_malloc_takes_the_settings_unless_the_user_has_some(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    assert tune_malloc()
    monkeypatch.setattr("os.environ", {"MALLOC_ARENA_MAX": "1"})
    assert not tune_malloc()


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
