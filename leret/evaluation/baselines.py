"""Systems without an LM: what searching costs nothing to know.

Both answer the program's predictors from a rule and go through the program itself, so that they see its cut-offs,
its number of hops and its `exclude_seen` exactly as a policy does. All questions advance together: what they search
for is asked of the retriever in one batch a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from leret.core.errors import ConfigError
from leret.core.types import Document, Ranking, Task
from leret.evaluation.results import Hop, Trace
from leret.programs.replay import Finished, NeedsCompletion, NeedsSearch, Replay
from leret.retrieval.base import Retriever

MAX_HOPS = 64
"""A program that still asks after so many steps is not going to end on a rule."""

_HEAD_WORDS = 12
"""Words of a document without a title that stand for it."""

Script = Callable[[Task, int], Sequence[str]]
"""(question, step from 0) to the texts to search for at that step."""


@dataclass
class _Run:
    """A question on its way through the program."""

    question: Task
    outputs: list[Mapping[str, Any]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    done: bool = False


def raw_question(question: Task, step: int) -> Sequence[str]:
    """The question itself, at every hop."""
    return (question.text,)


def oracle_titles(corpus: Mapping[str, Document], n_steps: Mapping[str, int]) -> Script:
    """The gold titles in their order, one a hop; the last hop asks for all that remain.

    A document without a title is asked for by its first words. A hop beyond the last title asks for that one again.

    Args:
        corpus: documents by id.
        n_steps: steps of the program by question id.
    """

    def script(question: Task, step: int) -> Sequence[str]:
        titles = [_title(corpus[doc_id]) for doc_id in question.gold if doc_id in corpus] or [question.text]
        if step >= n_steps.get(question.id, 1) - 1:
            return titles[step:] or titles[-1:]
        return (titles[min(step, len(titles) - 1)],)

    return script


def run_scripted(replay: Replay, retriever: Retriever, questions: Sequence[Task], script: Script) -> list[Trace]:
    """Run a program on a rule instead of an LM.

    Args:
        replay: the program.
        retriever: asked in batches, a (query, k) once.
        questions: any.
        script: the rule.

    Returns:
        One trace a question, in their order.

    Raises:
        ConfigError: the program's outputs are not texts, or it does not end.
        ProgramError: the program raised.
        RetrievalError: the retriever cannot answer.
    """
    known: dict[tuple[str, int], Ranking] = {}
    runs = [_Run(question) for question in questions]
    waiting = list(runs)
    while waiting:
        wanted = [need for run in waiting if (need := _advance(replay, run, script, known)) is not None]
        _search(retriever, dict.fromkeys(wanted), known)
        waiting = [run for run in waiting if not run.done]
    return [Trace(run.question.id, tuple(run.hops)) for run in runs]


def answer_fields(signature: type[dspy.Signature], texts: Sequence[str]) -> dict[str, Any]:
    """Outputs of a predictor that say ``texts``: a list where the field is one, else one line.

    Raises:
        ConfigError: an output field is neither a text nor a list of texts.
    """
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


def _advance(
    replay: Replay, run: _Run, script: Script, known: Mapping[tuple[str, int], Ranking]
) -> tuple[str, int] | None:
    """Go on until a search that is not known yet, which is returned, or the end."""
    while True:
        need = replay.run(run.question.text, run.outputs, lambda query, k: known.get((query, k)))
        if isinstance(need, NeedsSearch):
            return need.query, need.k
        if run.outputs:
            run.hops.append(Hop(run.queries[-1], None, need.ranking))
        if isinstance(need, Finished):
            run.done = True
            return None
        _answer(replay, run, script, need)


def _answer(replay: Replay, run: _Run, script: Script, need: NeedsCompletion) -> None:
    step = len(run.outputs)
    if step == MAX_HOPS:
        raise ConfigError(
            f"systems: {type(replay.program).__name__} does not end on a rule (it asks for more than {MAX_HOPS} "
            "completions); leave raw-question and oracle-titles out of `systems`"
        )
    texts = script(run.question, step)
    signature = dict(replay.program.named_predictors())[need.predictor].signature
    run.outputs.append(answer_fields(signature, texts))
    run.queries.append(" ".join(texts))


def _search(
    retriever: Retriever, wanted: Mapping[tuple[str, int], None], known: dict[tuple[str, int], Ranking]
) -> None:
    by_k: dict[int, list[str]] = defaultdict(list)
    for query, k in wanted:
        by_k[k].append(query)
    for k, queries in by_k.items():
        for query, ranking in zip(queries, retriever.search(queries, k), strict=True):
            known[query, k] = ranking


def _title(document: Document) -> str:
    return document.title.strip() or " ".join(document.text.split()[:_HEAD_WORDS])
