"""Sampling and evaluation against a server that lies, is away, or writes in another format."""

import gc
import json
import logging
import os
import signal
import threading
import time

import pytest
from aiohttp import web

from leret.config.evaluation import EvalRecipe
from leret.core.errors import PolicyError
from leret.core.runs import Run
from leret.evaluation.stage import evaluate
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from tests.sampling.fakes import questions, recipe_of, write_data
from tests.sampling.seeded_server import SeededServer

AWAY = {"error": {"message": "upstream is away"}}
UNKNOWN = [{"index": 0, "message": {"content": ""}, "finish_reason": "content_filter"}]


@pytest.fixture
def server():
    made = SeededServer()
    yield made
    made.close()


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    held_out = [
        {"id": f"h{i}", "question": f"and {q.text}", "answer": "", "relevant_doc_ids": list(q.gold)}
        for i, q in enumerate(questions(12))
    ]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return tmp_path


def served(server, **sampling):
    policy = {"kind": "openai", "model": "seeded", "urls": [server.url], "retry_for_s": 0, **sampling.pop("policy", {})}
    return recipe_of(policy=policy, **{"prompts": 1, "max_error_rate": 1.0, **sampling})


def of_question(number, lie):
    return lambda body: lie if f"number {number}" in body["messages"][-1]["content"] else {}


def content(run):
    with Store(run.store, read_only=True) as store:
        return list(store.groups())


@pytest.mark.parametrize("lie", [AWAY, {"choices": UNKNOWN}], ids=["error", "content filter"])
def test_failures_of_status_200_are_outages_and_are_asked_again(place, server, lie):
    whole, run = Run.create(place / "whole"), Run.create(place / "run")
    sample(served(server), whole)
    server.lie = of_question(7, lie)
    report = sample(served(server), run)
    assert (report.waiting, set(report.failures)) == (1, {"policy"})
    assert all(s.reward is None for g in content(run) for s in g.samples if s.failure)
    server.lie = lambda body: {}
    assert sample(served(server), run).waiting == 0
    assert content(run) == content(whole)


def test_a_failure_of_status_200_ends_the_prompt_bank_with_its_cause(place, server):
    server.lie = lambda body: AWAY
    with pytest.raises(PolicyError, match=r"the prompt bank could not be made: http.*upstream is away"):
        sample(served(server, prompts=3), Run.create(place / "run"))


@pytest.mark.parametrize("wait", ["for an answer", "for the end of a Retry-After"])
def test_a_bank_that_waits_for_its_server_is_stopped_at_once(place, server, wait):
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
        sample(served(server, prompts=3, policy={"retry_for_s": 60}), Run.create(place / "run"))
    assert time.monotonic() - began < 30


def test_an_evaluation_scores_no_failure_and_leaves_no_connection_open(place, server, caplog):
    gc.collect()  # what earlier tests left is not counted
    run = Run.create(place / "run")
    sample(served(server, prompts=3), run)
    recipe = EvalRecipe(questions=str(place / "held_out.jsonl"), split="all", systems=("base", "bank"), resamples=100)
    server.lie = of_question(7, {"choices": UNKNOWN})
    assert {row["failed"] for row in evaluate(recipe, run).summary["rows"]} == {1}
    server.lie = lambda body: {}
    report = evaluate(recipe, run)
    assert {row["failed"] for row in report.summary["rows"]} == {0}
    with caplog.at_level(logging.ERROR, "asyncio"):
        gc.collect()
    assert "Unclosed" not in caplog.text


def test_an_evaluation_asks_for_its_server_only_where_it_needs_it(place, server):
    run = Run.create(place / "run")
    sample(served(server), run)
    recipe = EvalRecipe(questions=str(place / "held_out.jsonl"), split="all", systems=("base",), resamples=100)
    evaluate(recipe, run)
    server.close()
    more = recipe.model_copy(update={"systems": ("base", "raw-question")})
    assert evaluate(more, run).asked == ("raw-question",)
    with pytest.raises(PolicyError, match="/v1/models cannot be reached"):
        evaluate(recipe.model_copy(update={"evaluation": "warm", "temperature": 0.5}), run)


def test_a_dead_server_is_told_before_the_data_is_read(tmp_path):
    recipe = recipe_of(policy={"kind": "openai", "model": "m", "urls": ["http://127.0.0.1:9/v1"], "retry_for_s": 0})
    with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9/v1/models cannot be reached"):
        sample(recipe, Run.create(tmp_path / "run"), base_dir=tmp_path)
    assert Run.open(tmp_path / "run").manifest().get("sampling") is None


def blank(share):
    """Every so many completions are empty, which the compact adapter cannot read."""
    choice = {"index": 0, "message": {"content": " "}, "finish_reason": "stop"}
    return lambda body: {"choices": [choice]} if body["seed"] % 100 < 100 * share else {}


def test_a_run_whose_completions_do_not_parse_stops_and_shows_one(place, server):
    server.lie = blank(1.0)
    run = Run.create(place / "run")
    for _ in range(2):  # the second time nothing is left to be sampled
        with pytest.raises(
            PolicyError, match=r"30 of 30 completions .*: ' ' is .*CompactAdapter reads '<query>'.* a new run directory"
        ):
            sample(served(server, samples=1), run)
    raised = sample(served(server, samples=1, max_unparsed_rate=1.0), run)
    assert (raised.failures, raised.pairs) == ({"parse": 30}, 0)


def test_a_long_run_whose_completions_do_not_parse_stops_early(place, server):
    server.lie = blank(1.0)
    with pytest.raises(PolicyError, match=r"completions do not parse"):
        sample(served(server, samples=8, concurrency=2), Run.create(place / "run"))
    assert server.answered < 100


def test_a_bank_of_which_nothing_parses_is_not_made(place, server):
    server.lie = blank(1.0)
    with pytest.raises(PolicyError, match=r"10 of 10 completions .*: ' ' is .*CompactAdapter reads '<query>'"):
        sample(served(server, prompts=3), Run.create(place / "run"))
    assert server.answered == 10


def test_four_completions_that_do_not_parse_refuse_no_run(place, server):
    server.lie = blank(1.0)
    report = sample(served(server, samples=1, data={"limit": 4}), Run.create(place / "run"))
    assert report.failures == {"parse": 4}
    bank = {"train_questions": 1, "dev_questions": 3, "candidates": 1}
    server.lie = lambda body: {} if server.answered > 1 else blank(1.0)(body)
    assert sample(served(server, prompts=3, data={"limit": 4}, bank=bank), Run.create(place / "other")).pairs >= 0


def test_a_share_of_completions_that_do_not_parse_is_let_pass(place, server):
    server.lie = blank(0.3)
    report = sample(served(server), Run.create(place / "run"))
    assert 0 < report.failures["parse"] < 0.5 * report.samples
    assert report.waiting == 0
