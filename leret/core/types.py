"""The values that pass between the stages. Plain, frozen, free of I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = Any
"""A value that ``json.dumps`` takes."""


# json.dumps would build an encoder at every call.
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def digest(*parts: Json) -> str:
    """A 32-digit hexadecimal name for JSON values, the same on every machine.

    >>> digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    True
    """
    text = _encode(parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus."""

    doc_id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its gold documents.

    ``gold`` is read by rewards and evaluation alone. ``type`` (bridge, comparison ...) and ``hops`` are for breaking
    results down; both may be unknown. ``split`` is the data set's own split, where it has one. ``relevance`` holds the
    grades of the gold documents where the data grade them; nDCG alone looks at it, rewards are binary.
    """

    id: str
    text: str
    answer: str | None = None
    gold: tuple[str, ...] = ()
    type: str | None = None
    hops: int | None = None
    split: str | None = None
    relevance: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def grades(self) -> dict[str, int]:
        """The gold documents with their grades, 1 where the data have none."""
        return {doc_id: self.relevance.get(doc_id, 1) for doc_id in self.gold}


class Passage(NamedTuple):
    """A document as a retriever returned it; a higher ``score`` is better.

    A named tuple because rankings are made by the million: a frozen dataclass takes twice as long to make.
    """

    doc_id: str
    title: str
    text: str
    score: float


Ranking = tuple[Passage, ...]
"""Passages, best first, no document twice."""


def merge(rankings: Iterable[Sequence[Passage]]) -> Ranking:
    """The union of several rankings by score: a document keeps its best score; ties keep the order of arrival.

    >>> a, b = Passage("a", "", "", 2.0), Passage("b", "", "", 3.0)
    >>> [p.doc_id for p in merge([[a], [b, a]])]
    ['b', 'a']
    """
    best: dict[str, Passage] = {}
    for ranking in rankings:
        for passage in ranking:
            known = best.get(passage.doc_id)
            if known is None or passage.score > known.score:
                best[passage.doc_id] = passage
    return tuple(sorted(best.values(), key=lambda passage: -passage.score))


@dataclass(frozen=True, slots=True)
class State:
    """A step's inputs, reached by the completions before it.

    Attributes:
        id: digest of (question id, predictor, inputs).
        step: LM calls before this one, so 0 at the first hop.
        messages: what the zero-shot prompt sends here: the prompt of every preference.
        parent: id of the sample that led here; None at the first step.
    """

    id: str
    question_id: str
    step: int
    predictor: str
    inputs: Mapping[str, Json]
    messages: tuple[Mapping[str, str], ...]
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward.

    ``kind`` is ``parse`` (the completion is not in the adapter's format: a fact about the policy, final), ``prompt``
    (it does not fit the model, final), ``policy``,
    ``retrieval`` or ``program`` (an outage or a crash: tried again at the next resume, never scored).
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action, or a whole run of a program, led to: all that a reward may look at.

    Attributes:
        ranking: everything retrieved so far, best first.
        outputs: the fields parsed from the completion.
        prediction: what the program returned; None before its end.
        text: the completion.
        steps: LM calls so far.
        failure: a completion that does not parse; an outage has no outcome.
    """

    task: Question
    ranking: Ranking = ()
    outputs: Mapping[str, Json] = field(default_factory=dict)
    prediction: Any = None
    text: str = ""
    steps: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion at one state under one prompt of the bank.

    Attributes:
        id: digest of all that asked for it: state, prompt, index, seed, sampling settings, policy.
        prompt: name of the prompt in the bank ("0" is zero-shot).
        outputs: the fields parsed from the completion.
        doc_ids: the accumulated ranking after this step, best first.
        scores: the retriever's scores of ``doc_ids``.
        reward: in [0, 1]; None exactly when ``failure`` is set.
        components: named parts of the reward, and measures beside it (``recall``).
    """

    id: str
    state_id: str
    question_id: str
    step: int
    prompt: str
    index: int
    seed: int
    completion: str | None = None
    outputs: Mapping[str, Json] = field(default_factory=dict)
    doc_ids: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    n_prompt_tokens: int | None = None
    n_completion_tokens: int | None = None
