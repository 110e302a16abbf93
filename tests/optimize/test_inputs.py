import asyncio

import dspy
import pytest

from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.core.errors import DataError, PolicyError
from leret.core.types import Outcome, Passage
from leret.optimize.inputs import CallBudget, LMCallsSpent, counted_lm, counted_policy, read_tasks, step_reward
from leret.policies.base import Request


def example(question="who?", **fields):
    return dspy.Example(question=question, **fields).with_inputs("question")


def echo(**settings):
    def answer(request):
        return text_response(request, f"said {messages_of(request)[-1]['content']}")

    return EngineLM("echo", answer, **settings)


@pytest.mark.parametrize(
    ("fields", "gold"),
    [
        ({"gold": ["a", "b", "a"]}, ("a", "b")),
        ({"relevant_doc_ids": [1, 2]}, ("1", "2")),
        ({"gold_titles": {"B", "A"}}, ("A", "B")),
        ({"gold": [], "gold_titles": "A"}, ("A",)),
        ({}, ()),
    ],
)
def test_gold_is_of_the_first_field_that_names_it(fields, gold):
    [task] = read_tasks([example(**fields)], None)
    assert task.gold == gold


def test_a_reward_by_name_needs_gold_and_compares_ids_or_titles():
    assert read_tasks([example()], lambda example, outcome: 1.0)
    with pytest.raises(DataError, match=r"trainset\[0\].*\(fields: question, answer\)"):
        read_tasks([example(answer="x")], "ap")
    assert step_reward("rr", read_tasks([example(gold=["7"])], "ap")) == "rr"
    examples = read_tasks([example(gold_titles=["Paris"])], "ap")
    ranking = (Passage("7", "Rome", "", 2.0), Passage("8", "Paris", "", 1.0))
    assert step_reward("rr", examples)(Outcome(next(iter(examples)), ranking=ranking)) == 0.5


def test_any_lm_of_dspy_is_a_policy_and_its_failure_an_outage():
    budget = CallBudget(3)
    policy = counted_policy(echo(temperature=0.3), budget)
    request = Request(({"role": "user", "content": "hello"},), (1, 2), 1.0, 8)
    assert [one.text for one in asyncio.run(policy.complete(request))] == ["said hello"] * 2
    keyed = [counted_policy(dspy.LM("openai/x", api_key=key), budget) for key in ("a", "b")]
    assert keyed[0].digest == keyed[1].digest
    assert policy.digest != counted_policy(echo(temperature=0.4), budget).digest
    with pytest.raises(LMCallsSpent):
        asyncio.run(policy.complete(request))
    broken = counted_policy(EngineLM("broken", lambda request: 1 / 0), CallBudget(None))
    with pytest.raises(PolicyError, match="leret/broken"):
        asyncio.run(broken.complete(request))


def test_calls_of_a_copied_lm_count():
    lm, budget = echo(), CallBudget(2)
    copied = counted_lm(lm, budget, temperature=0.0)
    assert isinstance(copied, type(lm))
    assert (copied.kwargs["temperature"], lm.kwargs.get("temperature")) == (0.0, None)
    copied("one")
    asyncio.run(copied.acall("two"))
    lm("three")
    with pytest.raises(LMCallsSpent):
        copied("four")
