import asyncio
import sys
import threading

import pytest

from leret.core.aio import gathered
from leret.core.dspy_internals import muted


def test_first_error_cancels_the_others():
    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(gathered([waits(), fails()]))
    assert ended == [True]


def test_blocks_of_two_threads_may_overlap(capsys):
    begun, left, before = threading.Event(), threading.Event(), sys.stdout

    def second():
        print("before")
        with muted():
            begun.set()
            left.wait(5)
            print("theirs")

    other = threading.Thread(target=second)
    with muted():
        other.start()
        begun.wait(5)
        print("mine")
    print("after")
    left.set()
    other.join()
    assert (sys.stdout, capsys.readouterr().out) == (before, "before\nafter\n")
