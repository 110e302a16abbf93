"""Systems are evaluated as far as they are not evaluated yet."""

from dataclasses import replace

import pytest

from leret.core.errors import PolicyError
from leret.core.progress import Silent
from leret.core.runs import Run
from leret.evaluation.measures import all_measures
from leret.evaluation.runner import EvaluationSetup, Evaluator, Policies
from leret.evaluation.systems import System
from leret.policies.local.chat_template import PromptTooLongError
from leret.programs.prompts import ZERO_SHOT, Prompt
from tests.evaluation.eval_fakes import CORPUS, QUESTIONS, Rule, Titles, copy_question, follow, program

BASE = System("base", "base", "base", prompt=ZERO_SHOT)
FEW_SHOT = Prompt("1", {"write_query": [{"question": "a", "query": "b"}]})
RAW = System("raw-question", "baseline")


@pytest.fixture
def make(tmp_path):
    run = Run.create(tmp_path / "run")

    def evaluator(rule=follow, questions=QUESTIONS, key="key", digest="d", **more):
        replay, formatter = program()
        opened = []

        def open_policy(system):
            opened.append(Rule(rule, digest))
            return opened[-1]

        setting = EvaluationSetup(replay, formatter, Titles(), Titles(), max_tokens=8, **more)
        policies = Policies(lambda system: digest, open_policy)
        made = Evaluator(
            run,
            run.eval,
            setting,
            policies,
            questions=questions,
            corpus=CORPUS,
            measures=all_measures(()),
            key=key,
            progress=Silent(),
        )
        made.opened = opened
        made.retriever = setting.retriever
        return made

    return evaluator


def recalls(kept, hop=2):
    return [row.measures["recall"] for row in kept.rows if row.hop == hop]


def test_a_policy_that_follows_the_passages_finds_both(make):
    kept, asked = make().evaluate(BASE)
    assert asked
    assert recalls(kept, 1) == [0.5] * 6
    assert recalls(kept) == [1.0] * 6
    assert kept.lm_calls == 12
    assert [row.query for row in kept.rows][:2] == ["Whom does Ann know?", "Fay"]


def test_a_policy_is_not_asked_twice(make):
    first, _ = make().evaluate(BASE)
    again = make()
    second, asked = again.evaluate(BASE)
    assert (asked, again.opened) == (False, [])
    assert second.rows == first.rows
    assert second.seconds == pytest.approx(first.seconds, abs=1e-3)


def test_more_questions_ask_only_the_new_ones(make):
    make(questions=QUESTIONS[:4]).evaluate(BASE)
    more = make()
    kept, _ = more.evaluate(BASE)
    assert more.opened[0].n_calls == 4
    assert [row.question_id for row in kept.rows if row.hop == 1] == [q.id for q in QUESTIONS]


@pytest.mark.parametrize("change", [{"digest": "other"}, {"key": "other"}, {"max_tokens": 9}], ids=str)
def test_another_policy_or_setting_is_evaluated_anew(make, change, tmp_path):
    make().evaluate(BASE)
    other = make(**{k: v for k, v in change.items() if k != "max_tokens"})
    if "max_tokens" in change:
        other._setting = replace(other._setting, max_tokens=9)
    other.evaluate(BASE)
    assert other.opened[0].n_calls == 12


def test_another_prompt_is_another_evaluation(make):
    make().evaluate(BASE)
    other = make()
    other.evaluate(replace(BASE, prompt=FEW_SHOT))
    assert other.opened[0].n_calls == 12


def failing(content):
    return None if "Cid" in content.splitlines()[0] else follow(content)


def test_an_outage_is_counted_and_tried_again(make):
    kept, _ = make(failing).evaluate(BASE)
    assert [row.failure for row in kept.rows if row.failure] == ["policy: the server is down"]
    mended = make()
    kept, asked = mended.evaluate(BASE)
    assert (asked, mended.opened[0].n_calls) == (True, 2)
    assert recalls(kept) == [1.0] * 6
    assert not any(row.failure for row in kept.rows)


def test_a_server_that_is_down_stops_the_evaluation(make):
    with pytest.raises(PolicyError, match=r"6 of 6 runs failed.*the server is down.*run the same command again"):
        make(lambda content: None).evaluate(BASE)


def long_prompt(name):
    def rule(content):
        if name in content.splitlines()[0]:
            raise PromptTooLongError("a prompt of 517 tokens does not fit")
        return follow(content)

    return rule


def test_prompts_of_which_most_do_not_fit_stop_the_evaluation(make):
    with pytest.raises(PolicyError, match=r"6 of 6 runs failed.*517 tokens"):
        make(long_prompt("")).evaluate(BASE)


def test_a_prompt_that_does_not_fit_stops_no_evaluation_of_others(make):
    for _ in range(2):  # it is tried again, alone
        kept, _ = make(long_prompt("Cid")).evaluate(BASE)
        assert [row.failure for row in kept.rows if row.failure] == ["prompt: a prompt of 517 tokens does not fit"]
        assert kept.lm_calls == 10


def test_an_interruption_keeps_what_is_done(make):
    def interrupted(content):
        if "Eve" in content.splitlines()[0]:
            raise KeyboardInterrupt
        return follow(content)

    evaluator = make(interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate(BASE)
    evaluator.close()
    rest = make()
    kept, _ = rest.evaluate(BASE)
    assert recalls(kept) == [1.0] * 6
    assert rest.opened[0].n_calls <= 12


def test_a_completion_that_does_not_parse_ends_the_run_there(make):
    kept, _ = make(lambda content: "" if " knows " in content else copy_question(content)).evaluate(BASE)
    last = [row for row in kept.rows if row.hop == 2]
    assert all(row.unparsed and row.query is None for row in last)
    assert recalls(kept) == [0.5] * 6


def test_a_baseline_asks_no_policy(make):
    evaluator = make()
    kept, _ = evaluator.evaluate(RAW)
    assert (evaluator.opened, kept.lm_calls) == ([], 0)
    assert recalls(kept) == [0.5] * 6
    oracle, _ = evaluator.evaluate(System("oracle-titles", "baseline"))
    assert recalls(oracle) == [1.0] * 6


def test_several_runs_where_it_is_not_greedy(make):
    kept, _ = make(temperature=1.0, samples=3).evaluate(BASE)
    assert {row.sample for row in kept.rows} == {0, 1, 2}
    assert kept.lm_calls == 36


def test_one_policy_is_held_at_a_time(make):
    evaluator = make()
    evaluator.evaluate(BASE)
    evaluator.evaluate(
        replace(BASE, name="bank:1", prompt=Prompt("1", {"write_query": [{"question": "a", "query": "b"}]}))
    )
    assert len(evaluator.opened) == 1
    evaluator.evaluate(replace(BASE, name="sft", policy="sft"))
    assert [policy.closed for policy in evaluator.opened] == [True, False]
    evaluator.close()
    assert evaluator.opened[1].closed
