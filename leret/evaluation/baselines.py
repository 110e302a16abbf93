"""Systems without an LM: what searching costs nothing to know.

Both answer the program's predictors by a rule and go through the program itself, so that they see its cut-offs, its
number of hops and its `exclude_seen` exactly as a policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dspy

from leret.core.errors import ConfigError
from leret.core.types import Document, Hop, Task
from leret.programs.prompts import Formatter
from leret.programs.replay import NeedsCompletion

_HEAD_WORDS = 12
"""Words of a document without a title that stand for it."""

Script = Callable[[Task, int], Sequence[str]]
"""(task, step from 0) to the texts to search for at that step."""


class ScriptedPolicy:
    """Answers the steps of a program by a rule instead of an LM; an `Actor`."""

    def __init__(self, formatter: Formatter, script: Script) -> None:
        self._formatter = formatter
        self._script = script

    async def act(self, task: Task, need: NeedsCompletion, step: int, index: int) -> Hop:
        """A hop without a completion."""
        outputs = answer_fields(self._formatter.signature(need.predictor), self._script(task, step))
        return Hop(need.predictor, need.inputs, (), None, outputs, need.ranking)


def raw_question(task: Task, step: int) -> Sequence[str]:
    """The question itself, at every hop."""
    return (task.text,)


def oracle_titles(corpus: Mapping[str, Document], n_steps: Mapping[str, int]) -> Script:
    """The gold titles in their order, one a hop; the last hop asks for all that remain.

    A document without a title is asked for by its first words. A hop beyond the last title asks for that one again.

    Args:
        corpus: documents by id.
        n_steps: steps of the program by task id.
    """

    def script(task: Task, step: int) -> Sequence[str]:
        titles = [_title(corpus[doc_id]) for doc_id in task.gold if doc_id in corpus] or [task.text]
        if step >= n_steps.get(task.id, 1) - 1:
            return titles[step:] or titles[-1:]
        return (titles[min(step, len(titles) - 1)],)

    return script


def answer_fields(signature: type[dspy.Signature], texts: Sequence[str]) -> dict[str, Any]:
    """Outputs of a predictor that hold ``texts``: a list where the field is one, else one line."""
    outputs: dict[str, Any] = {}
    for name, info in signature.output_fields.items():
        if info.annotation is str:
            outputs[name] = " ".join(texts)
        elif info.annotation == list[str]:
            outputs[name] = list(texts)
        else:
            raise ConfigError(
                f"systems: raw-question and oracle-titles need a program that writes texts, but {signature.__name__}."
                f"{name} is {info.annotation}; leave them out of `systems`"
            )
    return outputs


def _title(document: Document) -> str:
    return document.title.strip() or " ".join(document.text.split()[:_HEAD_WORDS])
