"""Reader: a policy that answers a question from the texts that a picker chose.

One user message holds the task's instruction, the texts as numbered facts, and the question. The answer is the first
line of a greedy completion. `answer_em` is a reward that scores a picker by the reader's answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from leret.config.policy import PolicySettings
from leret.core.aio import submit
from leret.core.errors import ConfigError
from leret.core.types import Outcome, Task
from leret.policies.base import Messages, Policy, Request
from leret.policies.load import shared_policy
from leret.rewards.answers import ANSWERS

_PLACE = "Answer with one word, the name of the place."
PROMPTS: Mapping[str, str] = {
    "qa1": f"The facts tell who went where; later facts hold over earlier ones. {_PLACE}",
    "qa2": f"The facts tell who went where, and who took or left which thing; a thing is where its bearer is. {_PLACE}",
    "qa3": f"The facts tell who went where, and who took or left which thing, in the order of time. The question is "
    f"where a thing was before it came to another place. {_PLACE}",
    "qa4": f"The facts tell which place lies in which direction of which other place. {_PLACE}",
    "qa5": "The facts tell who gave what to whom. Answer with one word, the name of a person or of a thing.",
    "questions": "Answer from the passages, with a name, a date or a few words; with yes or no where that is asked.",
}
"""Instructions by task: bAbI's tasks, and ``questions`` for all others."""

_CACHE_SIZE = 65_536
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


def task_of(id: str) -> str:
    """Return the key of `PROMPTS` for a question. The ids of bAbI's questions contain the task.

    >>> task_of("qa2_two-supporting-facts_train-12"), task_of("qa3-test-1"), task_of("5a70f0e7")
    ('qa2', 'qa3', 'questions')
    """
    match = re.match(r"qa[1-5](?=[-_])", id)
    return match[0] if match else "questions"


@dataclass(frozen=True)
class ReaderLM:
    """Answers questions with a policy. ``task`` is a key of `PROMPTS`, or None to derive it from the question's id."""

    policy: Policy
    task: str | None = None
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in PROMPTS:
            raise ConfigError(f"unknown task {self.task!r} for a reader; available: {', '.join(PROMPTS)}")

    def messages(self, id: str, question: str, texts: Sequence[str]) -> Messages:
        facts = "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
        prompt = f"{PROMPTS[self.task or task_of(id)]}\n\n{facts}\n\nQuestion: {question}\nAnswer:"
        return ({"role": "user", "content": prompt},)

    async def answer(self, id: str, question: str, texts: Sequence[str]) -> str:
        """Return the answer's text. PolicyError if the policy fails."""
        request = Request(self.messages(id, question, texts), (0,), 0.0, self.max_tokens)
        [completion] = await self.policy.complete(request)
        lines = _THOUGHT.sub("", completion.text, count=1).strip().splitlines()
        return lines[0].strip() if lines else ""


def score(answer: str, references: Sequence[str], measure: str = "em") -> float:
    """Return ``em`` or ``f1`` against the best reference, normalised as in HotpotQA's script; 0 if there are none."""
    return ANSWERS[measure](Outcome(Task("", {}, answers=tuple(references)), prediction=answer)) or 0.0


def answer_em(
    outcome: Outcome, policy: Mapping[str, Any], task: str | None = None, max_tokens: int = 32, measure: str = "em"
) -> float | None:
    """Score a reader's answer from all retrieved texts (a reward for the end of the program).

    ``policy`` holds the settings of a policy, as in a recipe. Returns None if the task has no reference answer or
    the program has not ended.

    Source: Q-RAG (arXiv 2511.07328), feedback from an LM's answers.
    """
    if not outcome.task.answers or outcome.prediction is None:
        return None
    if not outcome.ranking:
        return 0.0
    texts = tuple(f"{p.title} | {p.text}" if p.title else p.text for p in outcome.ranking)
    question = str(outcome.task.inputs.get("question", outcome.task.text))
    settings = json.dumps(dict(policy), sort_keys=True)
    answer = _cached_answer(settings, task, max_tokens, outcome.task.id, question, texts)
    return score(answer, outcome.task.answers, measure)


@lru_cache(_CACHE_SIZE)
def _cached_answer(
    policy: str, task: str | None, max_tokens: int, id: str, question: str, texts: tuple[str, ...]
) -> str:
    reader = ReaderLM(shared_policy(PolicySettings.model_validate(json.loads(policy))), task, max_tokens)
    return submit(reader.answer(id, question, texts)).result()
