"""Together's batch API, with the real SDK, as it ends well, ends badly, and is cut off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leret.errors import RunError
from leret.policies import dispatch, together_batch
from leret.policies.chat import server_seed
from tests.policies.conftest import ask
from tests.policies.servers import TogetherServer, serving

pytest.importorskip("together", reason="pip install 'leret[together]'")

from leret.policies.together import TogetherPolicy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(together_batch, "_LINGER_S", 0.05)
    monkeypatch.setenv("TOGETHER_API_KEY", "tgp_secret")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "together-batches.db"


def run(server: TogetherServer, ledger: Path | None, work: Callable[[TogetherPolicy], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with serving(server, under="/v1") as urls:
            return await on(urls[0], ledger, work)

    return asyncio.run(main())


async def on(url: str, ledger: Path | None, work: Callable[[TogetherPolicy], Awaitable[Any]]) -> Any:
    policy = TogetherPolicy("small", [url], batch=True, ledger=ledger, batch_least=2, poll_s=0.02)
    try:
        return await work(policy)
    finally:
        await policy.aclose()


async def ask_all(policy: TogetherPolicy, n: int = 5) -> list[str]:
    got = await asyncio.gather(*[policy.complete(ask("the city", seed)) for seed in range(n)], return_exceptions=True)
    return [str(one) if isinstance(one, BaseException) else one[0].text for one in got]


WANTED = [f"text {server_seed(seed)}.0" for seed in range(5)]


def test_requests_that_come_together_are_one_job_and_get_their_own_answers(ledger: Path) -> None:
    server = TogetherServer(polls=3)
    assert run(server, ledger, ask_all) == WANTED
    assert len(server.jobs) == 1
    assert "/v1/chat/completions" not in server.paths


def test_every_sample_of_a_prompt_is_a_line_with_its_own_seed(ledger: Path) -> None:
    server = TogetherServer()
    own = run(server, ledger, lambda policy: policy.complete(ask("the city", 0, 1, 2)))
    assert [completion.text for completion in own] == WANTED[:3]
    assert all("n" not in body for body in server.bodies)


def test_a_few_requests_are_sent_at_once(ledger: Path) -> None:
    server = TogetherServer()
    assert run(server, ledger, lambda policy: ask_all(policy, 1)) == WANTED[:1]
    assert server.jobs == {}


def test_the_next_step_is_the_next_job_and_tokens_are_counted(ledger: Path) -> None:
    server = TogetherServer()

    async def work(policy: TogetherPolicy) -> dict[str, float]:
        await ask_all(policy)
        await asyncio.gather(*[policy.complete(ask("the river", seed)) for seed in range(5)])
        return policy.meter.snapshot()

    told = run(server, ledger, work)
    assert len(server.jobs) == 2
    assert (told["prompt_tokens"], told["completion_tokens"], told["batch_jobs"]) == (50, 20, 0)


def test_progress_can_be_read_while_a_job_runs(ledger: Path) -> None:
    server = TogetherServer(polls=20)

    async def work(policy: TogetherPolicy) -> float:
        asking = asyncio.create_task(ask_all(policy))
        while not 0.2 < policy.meter.snapshot().get("batch_progress", 0.0) < 1.0:
            await asyncio.sleep(0.01)
            assert not asking.done()
        told = policy.meter.snapshot()
        await asking
        return told["batch_requests"]

    assert run(server, ledger, work) == 5


@pytest.mark.parametrize("status", ["COMPLETED", "EXPIRED", "CANCELLED"])
def test_what_a_job_leaves_out_goes_into_the_next_one(ledger: Path, status: str) -> None:
    server = TogetherServer()
    server.status, server.leaves_out = status, {0, 2, 4}
    assert run(server, ledger, ask_all) == WANTED
    assert [len(server.files[job["input_file_id"]].splitlines()) for job in server.jobs.values()] == [5, 3]


def test_a_line_that_failed_on_an_overload_is_asked_again_and_a_refused_one_is_not(ledger: Path) -> None:
    server = TogetherServer()
    server.fails = {0: {"message": "overloaded", "code": 503}, 1: {"message": "prompt is too long", "code": 400}}
    got = run(server, ledger, ask_all)
    [refused] = [text for text in got if text not in WANTED]
    assert "prompt is too long" in refused
    assert sum(len(server.files[job["input_file_id"]].splitlines()) for job in server.jobs.values()) <= 6


def test_an_answer_without_choices_is_asked_again(ledger: Path) -> None:
    server = TogetherServer()
    server.garbles = {0, 1}
    assert run(server, ledger, ask_all) == WANTED
    assert len(server.jobs) == 2


def test_a_job_that_fails_is_told_with_its_reason_and_its_requests_are_free_for_the_next_run(ledger: Path) -> None:
    server = TogetherServer()
    server.status, server.error = "FAILED", "model small is not for batches"

    async def work() -> tuple[list[str], list[str]]:
        async with serving(server, under="/v1") as [url]:
            return await on(url, ledger, ask_all), await on(url, ledger, ask_all)

    first, second = asyncio.run(work())
    assert all("model small is not for batches" in text for text in first)
    assert second == WANTED


BROKEN = {"text": "{", "json": '{"id": "ba'}
CASES = [
    *((at, fault) for at in range(4) for fault in ("503", "reset")),
    # To an upload without a Location the SDK answers with a stand-in address outside; that is not tried.
    *((at, fault) for at in range(1, 4) for fault in ("text", "json")),
]


@pytest.mark.parametrize(("at", "fault"), CASES)
def test_faults_between_upload_and_download_pass(ledger: Path, at: int, fault: str) -> None:
    # An answer that is no JSON is text to the SDK, and one that says it is JSON is a ValueError.
    # The calls that can fail here: begin the upload, create the job, look at it, download its answers.
    met: Any = fault
    if fault == "503":
        met = web.Response(status=503)
    elif fault in BROKEN:
        met = web.Response(text=BROKEN[fault], content_type="application/json" if fault == "json" else "text/plain")
    server = TogetherServer(faults=[None] * at + [met])
    assert run(server, ledger, ask_all) == WANTED
    assert server.faults == []
    assert len(server.jobs) <= 2


def test_answers_that_were_collected_are_not_paid_again(ledger: Path) -> None:
    server = TogetherServer()

    async def work() -> list[str]:
        async with serving(server, under="/v1") as [url]:
            await on(url, ledger, ask_all)
            return await on(url, ledger, ask_all)

    assert asyncio.run(work()) == WANTED
    assert len(server.jobs) == 1


def test_a_job_whose_creation_was_not_written_down_is_found_again(ledger: Path) -> None:
    server = TogetherServer(polls=2)

    async def work() -> list[str]:
        async with serving(server, under="/v1") as [url]:

            async def cut_off(policy: TogetherPolicy) -> None:
                asking = asyncio.create_task(ask_all(policy))
                while not server.jobs:  # the server has started it, and we have not heard
                    await asyncio.sleep(0)
                asking.cancel()

            await on(url, ledger, cut_off)
            return await on(url, ledger, ask_all)

    assert asyncio.run(work()) == WANTED
    assert len(server.jobs) == 1


PROGRAM = """
    import asyncio, sys
    from pathlib import Path
    from leret.policies import together_batch
    from tests.policies.test_together_batch import ask_all, on

    together_batch._LINGER_S = 0.05
    print(*asyncio.run(on(sys.argv[1], Path(sys.argv[2]), ask_all)), sep="\\n")
"""


def test_a_process_that_is_killed_while_its_job_runs_collects_that_job_when_it_is_started_again(ledger: Path) -> None:
    server = TogetherServer(polls=10**9)

    async def work() -> str:
        async with serving(server, under="/v1") as [url]:
            command = [sys.executable, "-c", textwrap.dedent(PROGRAM), url, str(ledger)]
            first = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
            while not any(job["looked"] for job in server.jobs.values()):
                await asyncio.sleep(0.02)
                assert first.returncode is None
            first.kill()
            await first.wait()
            server.polls = 1
            second = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            told, _ = await second.communicate()
            return told.decode()

    assert asyncio.run(work()).split("\n")[:5] == WANTED
    assert len(server.jobs) == 1


def test_nothing_that_is_kept_holds_the_key(ledger: Path) -> None:
    run(TogetherServer(), ledger, ask_all)
    kept = b"".join(path.read_bytes() for path in ledger.parent.iterdir())
    assert kept
    assert b"tgp_secret" not in kept


def test_a_ledger_of_another_version_is_refused(ledger: Path) -> None:
    import sqlite3

    run(TogetherServer(), ledger, ask_all)
    with sqlite3.connect(ledger) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(RunError, match="version 9"):
        TogetherPolicy("small", batch=True, ledger=ledger)


def test_a_batch_gives_up_after_three_jobs(ledger: Path) -> None:
    class Empty(TogetherServer):
        def _run(self, job: dict[str, Any]) -> None:
            self.leaves_out = set(range(5))
            super()._run(job)

    server = Empty()
    got = run(server, ledger, ask_all)
    assert all("gave up after 3 batch jobs" in text for text in got)
    assert len(server.jobs) == 3
