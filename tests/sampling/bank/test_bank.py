"""The bank of a run: made once, of a policy that is there, by a command that may be stopped."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web

from leret.core.errors import PolicyError
from leret.core.runs import Run
from leret.sampling.stage import sample
from tests.sampling.fakes import FakePolicy, content, policy_is, recipe_of
from tests.sampling.seeded_server import AWAY, blank, served


def test_own_prompts_are_taken_from_a_directory(run):
    Path("own").mkdir()
    demo = {"question": "who", "context": [], "query": "find who"}
    value = {"name": "mine", "score": None, "demos": {"write_query": [demo]}, "instructions": {}}
    Path("own/mine.json").write_text(json.dumps(value))
    report = sample(recipe_of(bank={"path": "own"}), run)
    assert list(report.prompts) == ["0", "1"]
    assert {s.prompt for group in content(run) for s in group.samples} == {"0", "1"}


def test_a_run_stopped_while_it_makes_its_bank_is_finished_by_the_same_command(run):
    whole = Run.create(Path("whole"))
    sample(recipe_of(), whole)

    class Stopping(FakePolicy):
        async def complete(self, request):
            if len(self.requests) == 40:
                os.kill(os.getpid(), signal.SIGINT)
            return await super().complete(request)

    with policy_is(Stopping()), pytest.raises(KeyboardInterrupt):
        sample(recipe_of(), run)
    assert "bank" not in run.manifest()
    sample(recipe_of(), run)
    assert content(run) == content(whole)


def test_a_failure_of_status_200_ends_the_prompt_bank_with_its_cause(run, server):
    server.lie = lambda body: AWAY
    with pytest.raises(PolicyError, match=r"the prompt bank could not be made: http.*upstream is away"):
        sample(served(server, prompts=3), run)


@pytest.mark.parametrize("wait", ["for an answer", "for the end of a Retry-After"])
def test_a_bank_that_waits_for_its_server_is_stopped_at_once(run, server, wait):
    stalled = []

    def stall(body):
        if not body["temperature"] and not stalled:  # of the candidates' scoring, in threads of DSPy's
            stalled.append(body)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if stalled and wait == "for an answer":
            server.delay_s = 60.0
        return bool(stalled) and wait != "for an answer" and web.Response(status=429, headers={"Retry-After": "40"})

    server.broken = stall
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sample(served(server, prompts=3, policy={"retry_for_s": 60}), run)
    assert time.monotonic() - began < 30


def test_a_bank_of_which_nothing_parses_is_not_made(run, server):
    server.lie = blank(1.0)
    with pytest.raises(PolicyError, match=r"10 of 10 completions .*: ' ' is .*CompactAdapter reads '<query>'"):
        sample(served(server, prompts=3), run)
    assert server.answered == 10
