import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from leret.config.evaluation import ReaderSettings
from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.errors import PolicyError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.evaluation.measures import all_measures
from leret.evaluation.runner import Evaluator, Policies
from leret.evaluation.systems import Hyde, OracleTitles, RawQuestion, System
from leret.policies.local.chat_template import PromptTooLongError
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.rollouts.actors import Decoding
from tests.evaluation.eval_fakes import CORPUS, Rule, follow, program
from tests.sampling.fakes import FakeRetriever, questions
from tests.tiny import tiny_policy

QUESTIONS = questions(6)
BASE = System("base", "base", "base", prompt=ZERO_SHOT)
RAW, HYDE = RawQuestion("raw-question", "baseline"), Hyde("hyde", "prompt", "base", prompt=ZERO_SHOT)
ORACLE = OracleTitles("oracle-titles", "baseline")
READER = ReaderSettings(policy=LocalPolicySettings(), passages=1, words=3)
FEW_SHOT = Prompt("1", {"write_query": [{"question": "a", "query": "b"}]})
OUTAGE = PolicyError("the server is down")
TOO_LONG = PromptTooLongError("a prompt of 517 tokens does not fit")


@pytest.fixture
def make(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run")

    def evaluator(rule=follow, questions=QUESTIONS, key="key", digest="d", parts=None, **more):
        samples, reader = more.pop("samples", 1), more.pop("reader", None)
        replay, formatter = parts or program()
        environment = SimpleNamespace(replay=replay, formatter=formatter, retriever=FakeRetriever(), corpus=CORPUS)
        opened = []
        opening = lambda *_: opened.append(Rule(rule, digest)) or opened[-1]  # noqa: E731
        monkeypatch.setattr("leret.evaluation.runner.open_policies", opening)
        policies = type("Ruled", (Policies,), {"digest": lambda *_: digest})(LocalPolicySettings())
        shared = run, run.eval, environment, Decoding(**{"max_tokens": 8, **more}), samples
        made = Evaluator(*shared, policies, questions, all_measures({}), key, Progress(), reader=reader)
        made.opened = opened
        return made

    return evaluator


def recalls(results, hop=2):
    return [row.measures["recall"] for row in results.rows if row.hop == hop]


def failures(results):
    return [row.failure for row in results.rows if row.failure]


def failing(word, error=OUTAGE):
    def rule(content):
        if word in content.splitlines()[0]:
            raise error
        return follow(content)

    return rule


def test_a_policy_that_follows_the_passages_finds_both_and_is_not_asked_twice(make):
    first, asked = make().evaluate(BASE)
    assert (asked, recalls(first, 1), recalls(first), first.lm_calls) == (True, [0.5] * 6, [1.0] * 6, 12)
    assert [row.query for row in first.rows][:2] == ["what follows alpha number 0", "beta"]
    again = make()
    second, asked = again.evaluate(BASE)
    assert (asked, again.opened, second.rows) == (False, [], first.rows)
    assert second.seconds == pytest.approx(first.seconds, abs=1e-3)


@pytest.mark.parametrize("change", [{}, {"digest": "other"}, {"key": "other"}, {"max_tokens": 9}, {"prompt": FEW_SHOT}])
def test_only_what_has_no_result_is_asked(make, change):
    make(questions=QUESTIONS[:4]).evaluate(BASE)
    other = make(**{name: value for name, value in change.items() if name != "prompt"})
    results, _ = other.evaluate(replace(BASE, prompt=change.get("prompt", ZERO_SHOT)))
    assert other.opened[0].n_calls == (12 if change else 4)
    assert [row.question_id for row in results.rows if row.hop == 1] == [q.id for q in QUESTIONS]


@pytest.mark.parametrize(("error", "kind"), [(OUTAGE, "policy"), (TOO_LONG, "prompt")])
def test_a_run_that_failed_stops_no_others_and_is_tried_again(make, error, kind):
    results, _ = make(failing("gamma", error)).evaluate(BASE)
    assert (failures(results), results.lm_calls) == ([f"{kind}: {error}"], 10)
    later = make()
    results, asked = later.evaluate(BASE)
    assert (asked, later.opened[0].n_calls, recalls(results), failures(results)) == (True, 2, [1.0] * 6, [])


@pytest.mark.parametrize(
    ("error", "says"), [(OUTAGE, "the server is down.*run the same command again"), (TOO_LONG, "517 tokens")]
)
def test_an_evaluation_of_which_most_fails_stops(make, error, says):
    with pytest.raises(PolicyError, match=rf"6 of 6 runs failed.*{says}"):
        make(failing("", error)).evaluate(BASE)


def test_an_interruption_keeps_what_is_done(make):
    evaluator = make(failing("epsilon", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate(BASE)
    evaluator.close()
    rest = make()
    results, _ = rest.evaluate(BASE)
    assert recalls(results) == [1.0] * 6
    assert rest.opened[0].n_calls <= 12


@pytest.mark.parametrize(("system", "n_calls"), [(RAW, 1), (ORACLE, 1), (BASE, 3), (HYDE, 3)])
def test_the_reader_answers_from_what_any_system_found(make, system, n_calls):
    def repeat(content):  # the reader's answer is its prompt
        return content if content.endswith("Answer in a few words.") else follow(content)

    evaluator = make(repeat, reader=READER)
    results, _ = evaluator.evaluate(system)
    for row, question in zip((row for row in results.rows if row.hop == 2), QUESTIONS, strict=True):
        found = [f"{name}: {name} leads" for name in row.doc_ids[:1]]  # HyDE finds nothing
        lines = [*found, f"question: {question.text}", "answer in a few words."]
        assert json.loads(row.prediction).lower() == "\n".join(lines)
    assert (results.lm_calls, results.cost(6)["tokens"]) == (6 * n_calls, 8 * n_calls)


@pytest.mark.parametrize(("error", "kind"), [(OUTAGE, "policy"), (TOO_LONG, "prompt")])
def test_a_reader_that_fails_leaves_the_run_without_scores_to_be_run_again(make, error, kind):
    def fail(content):
        if content.endswith("Answer in a few words.") and "number 2" in content:
            raise error
        return follow(content)

    results, _ = make(fail, reader=READER).evaluate(BASE)
    assert failures(results) == [f"{kind}: reader (1 passages): {error}"]
    assert [row.measures for row in results.rows if row.question_id == QUESTIONS[2].id] == [{}, {}, {}]
    again = make(reader=READER)
    assert failures(again.evaluate(BASE)[0]) == []
    assert [policy.n_calls for policy in again.opened] == [2, 1]


def test_several_runs_where_it_is_not_greedy(make):
    results, _ = make(temperature=1.0, samples=3).evaluate(BASE)
    assert ({row.sample for row in results.rows}, results.lm_calls) == ({0, 1, 2}, 36)


@pytest.mark.parametrize(("dtype", "opened"), [("float32", "float32"), (None, "bfloat16")])
def test_local_policies_are_evaluated_in_float32(make, tmp_path, dtype, opened):
    served = OpenAIPolicySettings(model="m", urls=("http://127.0.0.1:1/v1",))
    evaluator = make()
    evaluator.dtype = dtype
    policy = evaluator._make(LocalPolicySettings(model=str(tiny_policy(tmp_path / "tiny")), dtype="bfloat16"))
    assert str(next(policy.model.network.parameters()).dtype) == f"torch.{opened}"
    policy.close()
    assert evaluator._make(served).settings == served
