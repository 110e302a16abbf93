import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from benchmarks.babilong import reader
from benchmarks.babilong.reader import PROMPTS, ReaderLM, answer_em
from leret.config.sampling import RewardSettings
from leret.core.errors import PolicyError
from leret.core.types import Outcome, Passage, Task
from leret.policies.base import Completion
from leret.rewards import scoring

TASK = Task("qa2-1", {"question": "Where is the milk?", "chunks": ["..."]}, ("1",), ("kitchen",))
FOUND = (Passage("1", "", "Mary took the milk.", 1.0), Passage("2", "House", "Mary is in the kitchen.", 0.5))


def scripted(text):
    complete = AsyncMock(return_value=[Completion(text, "stop", 1, 1)])
    return SimpleNamespace(name="scripted", digest="scripted", complete=complete)


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" The kitchen.\nBecause she went there.", "The kitchen."), ("<think>Mary\ntook it</think>\n\nkitchen", "kitchen"),
     ("", "")],
)  # fmt: skip
def test_the_first_line_after_any_thought_is_the_answer(text, answer):
    policy = scripted(text)
    assert asyncio.run(ReaderLM(policy).answer("qa2-1", "Where is the milk?", ["Mary took it.", "She left."])) == answer
    [request] = policy.complete.call_args.args
    asked = request.messages[0]["content"]
    assert asked.startswith(PROMPTS["qa2"])
    assert "1. Mary took it.\n2. She left.\n\nQuestion: Where is the milk?" in asked
    assert (request.temperature, request.seeds) == (0.0, (0,))


def test_answer_em_is_of_the_end_and_asks_once_for_the_same_texts(monkeypatch):
    asked = scripted("kitchen")
    monkeypatch.setattr(reader, "shared_policy", lambda settings: asked)
    reader._cached_answer.cache_clear()
    part = {"function": "benchmarks.babilong.reader:answer_em", "policy": {"model": "demo"}}
    worth = scoring(RewardSettings.model_validate({"parts": {"answer_em": part}}))
    assert worth(Outcome(TASK, ranking=FOUND, prediction=None)) is None
    assert worth(Outcome(TASK, prediction={})) == 0.0
    assert not asked.complete.called
    assert [worth(Outcome(TASK, ranking=FOUND, prediction={})) for _ in range(2)] == [1.0, 1.0]
    asked.complete.assert_called_once()
    assert "2. House | Mary is in the kitchen." in asked.complete.call_args.args[0].messages[0]["content"]
    assert worth(Outcome(Task("q", TASK.inputs), ranking=FOUND, prediction={})) is None
    reader._cached_answer.cache_clear()
    asked.complete.side_effect = PolicyError("the server is down")
    with pytest.raises(PolicyError, match="down"):
        answer_em(Outcome(TASK, ranking=FOUND, prediction={}), {"model": "demo"})
