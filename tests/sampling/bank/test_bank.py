import os
import signal
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web

from leret.config.sampling import SamplingSettings
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.sampling.bank.bank import n_candidates
from leret.sampling.stage import sample
from tests.sampling.fakes import FakePolicy, content, policy_is, recipe_of, served


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stopped_while_it_makes_its_bank_is_finished_by_the_same_command(run):
    recipe, whole = recipe_of(data={"limit": 10}), Run.create(Path("whole"))
    sample(recipe, whole)
    number = count()
    stopping = FakePolicy(fail=lambda request: next(number) == 20 and interrupt())
    with policy_is(stopping), pytest.raises(KeyboardInterrupt):
        sample(recipe, run)
    assert run.manifest.bank is None
    sample(recipe, run)
    assert content(run) == content(whole)


def test_prompts_for_a_predictor_that_the_program_lacks_are_refused(run, tmp_path):
    Prompt("mine", {"write": [{"question": "Who?", "query": "who"}]}).save(tmp_path / "mine.json")
    with pytest.raises(ConfigError, match=r"bank\.path: unknown predictor 'write'; in the program: write_query"):
        sample(recipe_of(bank={"path": str(tmp_path)}), run)


def test_a_bank_that_waits_for_its_server_is_stopped_at_once(run, server):
    stalled = []

    def stall(body):
        if not body["temperature"] and not stalled:  # of the candidates' scoring, in threads of DSPy's
            stalled.append(body)
            threading.Timer(0.5, interrupt).start()
        return bool(stalled) and web.Response(status=429, headers={"Retry-After": "40"})

    server.broken = stall
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sample(served(server, prompts=3, policy={"retry_for_s": 60}), run)
    assert time.monotonic() - began < 30


def test_a_small_run_gets_a_small_bank():
    assert n_candidates(SamplingSettings(), 1700) == 8
    assert n_candidates(SamplingSettings(), 100) == 3  # 50 + 3 * 50 program runs of the bank, 100 * 4 of sampling
    assert n_candidates(SamplingSettings(prompts=6), 4) == 5  # one for each few-shot prompt
    assert n_candidates(SamplingSettings(bank={"candidates": 8}), 24) == 8
