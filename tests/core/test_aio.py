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


def test_print_of_another_thread_outlives_its_block(capsys):
    """CPython 3.11 keeps no reference to a print's stream: a stream dropped during the print is another object."""
    begun, left = threading.Event(), threading.Event()

    class Late:
        def __str__(self):
            begun.set()
            left.wait(5)
            return "late"

    other = threading.Thread(target=print, args=(Late(), "words"))
    with muted():
        other.start()
        begun.wait(5)
    with muted():
        pass
    left.set()
    other.join()
    assert capsys.readouterr().out == "late words\n"


def test_blocks_of_two_threads_may_overlap(capsys):
    begun, left, before = threading.Event(), threading.Event(), sys.stdout

    def second():
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
    assert (sys.stdout, capsys.readouterr().out) == (before, "after\n")
