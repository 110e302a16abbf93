"""Together's batch API under a policy: requests that come together become one job, and a job is never paid twice.

A state-by-state sampler asks for many completions, waits for them, and asks for the next ones. Such a wave is written
down, uploaded and started as a batch job as soon as no further request joins it for a moment. Each of these steps can
be the last one before a crash: the next process finds the wave in the ledger and goes on with it from there. A wave of
a few requests is not worth the wait for a job, and is sent at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from leret.errors import PolicyError
from leret.policies.base import Completion
from leret.policies.batch_files import Outcome, is_whole, outcomes_of, request_lines
from leret.policies.batch_ledger import BatchLedger, Wave
from leret.policies.chat import Send
from leret.policies.meter import Meter
from leret.policies.replies import RefusedError, TryAgainError, completions_of
from leret.policies.together_api import TogetherApi
from leret.types import digest

__all__ = ["BatchJobs"]

_log = logging.getLogger(__name__)

_MOST_REQUESTS = 50_000
_MOST_BYTES = 90_000_000
_LINGER_S = 2.0
_TIMES = 3
_ENDED = {"COMPLETED", "FAILED", "EXPIRED", "CANCELLED"}


class BatchJobs:
    """Answers chat requests by batch jobs; in one event loop at a time.

    Args:
        api: the SDK.
        direct: sends a request by itself.
        ledger: file of the jobs; None keeps them in memory.
        meter: gets the jobs' progress.
        least: requests of a wave that are worth a job.
        poll_s: between two looks at a job.
        linger_s: how long a wave waits for another request; None is two seconds.
    """

    def __init__(
        self,
        api: TogetherApi,
        direct: Send,
        ledger: Path | None,
        meter: Meter,
        *,
        least: int,
        poll_s: float,
        linger_s: float | None = None,
    ) -> None:
        self._api = api
        self._direct = direct
        self._ledger = BatchLedger(ledger)
        self._least = least
        self._poll_s = poll_s
        self._linger_s = _LINGER_S if linger_s is None else linger_s
        self._asked: dict[str, asyncio.Future[Outcome | None]] = {}
        self._wave: dict[str, str] = {}
        self._n_bytes = 0
        self._flush: asyncio.TimerHandle | None = None
        self._going: dict[int, asyncio.Task[dict[str, Outcome]]] = {}
        self._progress: dict[int, float] = {}
        meter.watch(self._gauges)

    async def send(self, body: dict[str, Any], n: int | None) -> list[Completion]:
        """Answer a chat request.

        Raises:
            PolicyError: it was refused, or no answer came from several jobs.
        """
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        key = digest("together batch", body)
        reason = "no answer came"
        for _ in range(_TIMES):
            outcome = await self._outcome(key, text)
            if outcome is None:
                return await self._direct(body, n)
            if outcome.body is None:
                reason = outcome.reason
                if not outcome.again:
                    raise RefusedError(f"Together refused a request of a batch job: {reason}; mend policy.model or it")
                continue
            try:
                return completions_of(outcome.body, n, body["max_tokens"], "Together's batch job")
            except TryAgainError as error:
                reason = str(error)
                self._ledger.forget([key])
        raise PolicyError(f"{reason}; gave up after {_TIMES} batch jobs; run again to ask once more").failed()

    async def aclose(self) -> None:
        """Stop looking at the jobs; they go on, and the ledger knows them. May be called twice."""
        if self._flush is not None:
            self._flush.cancel()
        tasks = list(self._going.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._asked.values():
            future.cancel()
        self._asked.clear()
        self._wave.clear()
        self._ledger.close()

    async def _outcome(self, key: str, text: str) -> Outcome | None:
        """What came of a request; None where it is to be sent by itself."""
        known = self._ledger.answer(key)
        if known is not None:
            return Outcome(known)
        future = self._asked.get(key)
        if future is None:
            future = self._asked[key] = asyncio.get_running_loop().create_future()
            wave = self._ledger.open_wave(key)
            if wave is not None:
                self._go_on(wave)
            else:
                self._join(key, text)
        return await asyncio.shield(future)

    def _join(self, key: str, text: str) -> None:
        self._wave[key] = text
        self._n_bytes += len(text) + 100
        if self._flush is not None:
            self._flush.cancel()
        if len(self._wave) >= _MOST_REQUESTS or self._n_bytes >= _MOST_BYTES:
            self._start()
        else:
            self._flush = asyncio.get_running_loop().call_later(self._linger_s, self._start)

    def _start(self) -> None:
        bodies, self._wave, self._n_bytes, self._flush = self._wave, {}, 0, None
        if len(bodies) >= self._least:
            self._go_on(self._ledger.begin(bodies))
            return
        for key in bodies:
            self._asked.pop(key).set_result(None)

    def _go_on(self, wave: Wave) -> None:
        """Carry a wave to its end, from wherever it is."""
        if wave.id in self._going:
            return
        task = self._going[wave.id] = asyncio.get_running_loop().create_task(self._carry(wave))
        task.add_done_callback(lambda done: self._carried(wave, done))

    def _carried(self, wave: Wave, task: asyncio.Task[dict[str, Outcome]]) -> None:
        self._going.pop(wave.id, None)
        self._progress.pop(wave.id, None)
        if task.cancelled():
            return
        error = task.exception()
        for key in self._ledger.bodies(wave):
            future = self._asked.pop(key, None)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(task.result().get(key) or Outcome(None, "a batch job left the request out", True))
            else:
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more

    async def _carry(self, wave: Wave) -> dict[str, Outcome]:
        self._progress[wave.id] = 0.0
        if wave.file_id is None:
            wave = self._ledger.uploaded(wave, await self._upload(wave))
        if wave.job_id is None:
            wave = self._ledger.started(wave, await self._create(wave))
            _log.info("batch job %s: %d requests", wave.job_id, len(self._ledger.bodies(wave)))
        job = await self._ended(wave)
        outcomes: dict[str, Outcome] = {}
        for file_id in (job.error_file_id, job.output_file_id):
            if file_id:
                outcomes |= outcomes_of(await self._download(file_id))
        answers = [(key, one.body) for key, one in outcomes.items() if one.body is not None]
        self._ledger.over(wave, answers)
        _log.info("batch job %s: %s, %d answers", wave.job_id, job.status, len(answers))
        if job.status == "FAILED" and not outcomes:
            raise PolicyError(
                f"Together's batch job {wave.job_id} failed ({job.error or 'no reason given'}); mend the cause, then "
                "run again"
            ).failed()
        return outcomes

    async def _upload(self, wave: Wave) -> str:
        with tempfile.TemporaryDirectory(prefix="leret-batch-") as directory:
            path = Path(directory) / f"leret-{wave.id}.jsonl"
            path.write_text(request_lines(self._ledger.bodies(wave)), encoding="utf-8")

            async def call(client: Any, url: str, timeout_s: float) -> str:
                # The server knows a file by its checksum, so an upload that is repeated gives the same id.
                return str(_read(await client.files.upload(file=path, purpose="batch-api", check=False), url).id)

            return await self._api.run(call, patience=10.0)

    async def _create(self, wave: Wave) -> str:
        known = self._ledger.jobs()

        async def call(client: Any, url: str, timeout_s: float) -> str:
            # A job whose creation was not heard of, before a crash or behind a lost answer, is found again.
            for job in _read(await client.batches.list(), url) or []:
                ours = job.input_file_id == wave.file_id and job.id not in known
                if ours and job.status not in _ENDED - {"COMPLETED"}:
                    return str(job.id)
            made = _read(await client.batches.create(endpoint="/v1/chat/completions", input_file_id=wave.file_id), url)
            if made.job is None or not made.job.id:
                raise TryAgainError(f"{url} started no batch job", "garbled")
            return str(made.job.id)

        return await self._api.run(call)

    async def _ended(self, wave: Wave) -> Any:
        async def call(client: Any, url: str, timeout_s: float) -> Any:
            return _read(await client.batches.retrieve(wave.job_id), url)

        while True:
            job = await self._api.run(call)
            if job.progress is not None and job.progress != self._progress.get(wave.id):
                self._progress[wave.id] = float(job.progress)
                _log.info("batch job %s: %s, %.0f %%", wave.job_id, job.status, job.progress)
            if job.status in _ENDED:
                return job
            await asyncio.sleep(self._poll_s)

    async def _download(self, file_id: str) -> str:
        async def call(client: Any, url: str, timeout_s: float) -> str:
            content: bytes = await (await client.files.content(file_id)).read()
            text = content.decode(errors="replace")
            if not is_whole(text):
                raise TryAgainError(f"{url} sent a part of file {file_id}", "garbled")
            return text

        return await self._api.run(call, patience=10.0)

    def _gauges(self) -> dict[str, float]:
        told = {"batch_jobs": float(len(self._going)), "batch_requests": float(len(self._asked))}
        if self._progress:
            told["batch_progress"] = sum(self._progress.values()) / len(self._progress) / 100
        return told


def _read(answer: Any, url: str) -> Any:
    """An answer of the SDK, which hands on as text what is no JSON."""
    if isinstance(answer, str):
        raise TryAgainError(f"{url} sent what the SDK cannot read", "garbled")
    return answer
