"""Work of many coroutines, and output that is dropped."""

import asyncio
import threading

import pytest

from leret.core.aio import for_each, gathered, submit, suppress_output


def test_items_pass_a_slow_one_by_and_no_more_run_than_allowed():
    running, most, ended, slow = 0, 0, [], asyncio.Event()

    async def do(item):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await (slow.wait() if item == 0 else asyncio.sleep(0))
        ended.append(item)
        running -= 1
        if len(ended) == 9:
            slow.set()

    asyncio.run(for_each(range(10), do, 2))
    assert (ended[-1], sorted(ended), most) == (0, list(range(10)), 2)


def test_a_failure_ends_the_others_and_waits_for_them():
    cleaned = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(gathered([wait(), fail()]))
    assert cleaned == [True]


def test_callers_that_wait_share_one_loop():
    async def loop():
        return asyncio.get_running_loop()

    assert submit(loop()).result(10) is submit(loop()).result(10)


def test_only_the_threads_own_output_is_dropped(capsys):
    with suppress_output("dspy"):
        print("dropped")
        other = threading.Thread(target=print, args=("kept",))
        other.start()
        other.join()
    assert capsys.readouterr().out == "kept\n"
