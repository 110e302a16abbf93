"""Sampling and evaluation against a server that lies, is away, or writes in another format."""

import gc
import logging
from pathlib import Path

import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.errors import PolicyError
from leret.core.runs import Run
from leret.evaluation.stage import evaluate
from leret.sampling.stage import sample
from tests.sampling.fakes import content, recipe_of
from tests.sampling.seeded_server import AWAY, blank, served

UNKNOWN = {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "content_filter"}]}


@pytest.fixture
def held_out(run):
    """The recipe of an evaluation on questions that were not sampled."""
    text = Path("questions.jsonl").read_text().replace('"id": "q', '"id": "h').replace("what follows", "and then what")
    Path("held_out.jsonl").write_text(text)
    return EvalRecipe(questions="held_out.jsonl", split="all", systems=("base",), resamples=100)


def about_7(lie):
    """The lie is told about question number 7 alone."""
    return lambda body: lie if "number 7" in body["messages"][-1]["content"] else {}


@pytest.mark.parametrize("lie", [AWAY, UNKNOWN], ids=["error", "content filter"])
def test_failures_of_status_200_are_outages_and_are_asked_again(run, server, lie):
    whole = Run.create(Path("whole"))
    sample(served(server), whole)
    server.lie = about_7(lie)
    report = sample(served(server), run)
    assert (report.waiting, set(report.failures)) == (1, {"policy"})
    assert all(s.reward is None for g in content(run) for s in g.samples if s.failure)
    server.lie = lambda body: {}
    assert sample(served(server), run).waiting == 0
    assert content(run) == content(whole)


def test_an_evaluation_scores_no_failure_and_leaves_no_connection_open(run, held_out, server, caplog):
    gc.collect()  # what earlier tests left is not counted
    sample(served(server, prompts=3), run)
    recipe = held_out.model_copy(update={"systems": ("base", "bank")})
    for lie, n_failed in ((UNKNOWN, 1), ({}, 0)):
        server.lie = about_7(lie)
        assert {row["failed"] for row in evaluate(recipe, run).summary["rows"]} == {n_failed}
    with caplog.at_level(logging.ERROR, "asyncio"):
        gc.collect()
    assert "Unclosed" not in caplog.text


def test_an_evaluation_asks_for_its_server_only_where_it_needs_it(run, held_out, server):
    sample(served(server), run)
    evaluate(held_out, run)
    server.close()
    assert evaluate(held_out.model_copy(update={"systems": ("base", "raw-question")}), run).asked == ("raw-question",)
    with pytest.raises(PolicyError, match="/v1/models cannot be reached"):
        evaluate(held_out.model_copy(update={"evaluation": "warm", "temperature": 0.5}), run)


def test_a_dead_server_is_told_before_the_data_is_read(tmp_path):
    recipe = recipe_of(policy={"kind": "openai", "model": "m", "urls": ["http://127.0.0.1:9/v1"], "retry_for_s": 0})
    with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9/v1/models cannot be reached"):
        sample(recipe, Run.create(tmp_path / "run"), base_dir=tmp_path)
    assert Run.open(tmp_path / "run").manifest().get("sampling") is None


def test_a_run_whose_completions_do_not_parse_stops_and_shows_one(run, server):
    server.lie = blank(1.0)
    for _ in range(2):  # the second time nothing is left to be sampled
        with pytest.raises(PolicyError, match=r"30 of 30 completions .*: ' ' is .*Adapter reads.* a new run directory"):
            sample(served(server, samples=1), run)
    raised = sample(served(server, samples=1, max_unparsed_rate=1.0), run)
    assert (raised.failures, raised.pairs) == ({"parse": 30}, 0)


def test_a_long_run_whose_completions_do_not_parse_stops_early(run, server):
    server.lie = blank(1.0)
    with pytest.raises(PolicyError, match=r"completions do not parse"):
        sample(served(server, samples=8, concurrency=2), run)
    assert server.answered < 100


def test_a_share_of_completions_that_do_not_parse_is_let_pass(run, server):
    server.lie = blank(0.3)
    report = sample(served(server), run)
    assert 0 < report.failures["parse"] < 0.5 * report.samples
    assert report.waiting == 0
