"""Coroutines that end together, and output that is held back; `submit` is in tests/http/test_client.py."""

import asyncio
import logging
import sys
import threading

import pytest

from leret.core.aio import for_each, gathered, suppress_output, suppress_threads


def test_items_are_taken_up_without_a_barrier():
    running, most, done = set(), [], []

    async def one(item):
        running.add(item)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(item)
        done.append(item)

    asyncio.run(for_each(iter(range(7)), one, 3))
    assert (sorted(done), max(most)) == (list(range(7)), 3)


def test_what_one_raises_ends_the_others_first():
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


def test_output_is_as_it_was_after_two_threads_that_held_theirs_back():
    begun, left = threading.Event(), threading.Event()
    before = sys.stdout, sys.stderr, logging.getLogger("dspy").level

    def second():
        begun.set()
        with suppress_output("dspy"):
            left.wait(5)

    other = threading.Thread(target=second)
    with suppress_output("dspy"):
        other.start()
        begun.wait(5)
    left.set()
    other.join()
    assert (sys.stdout, sys.stderr, logging.getLogger("dspy").level) == before


def test_one_thread_is_held_back_and_the_others_are_heard(capsys):
    with suppress_output("dspy"), suppress_threads("no thread"):
        print("mine")
        other = threading.Thread(target=print, args=("theirs",))
        other.start()
        other.join()
    assert capsys.readouterr().out == "theirs\n"
