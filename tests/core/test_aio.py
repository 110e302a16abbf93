import asyncio
import sys
import threading

import pytest

from leret.core.aio import for_each, gathered
from leret.core.dspy_internals import muted


def test_items_start_without_a_barrier():
    running, most, done = set(), [], []

    async def one(item):
        running.add(item)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(item)
        done.append(item)

    asyncio.run(for_each(iter(range(7)), one, 3))
    assert (sorted(done), max(most)) == (list(range(7)), 3)


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
