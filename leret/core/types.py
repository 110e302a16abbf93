"""The values that pass between the stages. Plain, frozen, free of I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import c_make_encoder, encode_basestring, encode_basestring_ascii  # type: ignore[attr-defined]
from operator import attrgetter
from typing import Any, NamedTuple, Self

Json = Any
"""A value that ``json.dumps`` takes."""


def json_encoder(**options: Any) -> Callable[[Json], str]:
    """``json.dumps`` with these options, in a third of the time: it makes an encoder anew each time.

    >>> json_encoder(separators=(",", ":"))({"a": [1, None]})
    '{"a":[1,null]}'
    """
    own = json.JSONEncoder(**options)
    text = encode_basestring_ascii if own.ensure_ascii else encode_basestring
    separators = own.key_separator, own.item_separator
    encode = c_make_encoder(None, own.default, text, None, *separators, own.sort_keys, own.skipkeys, own.allow_nan)
    return lambda value: "".join(encode(value, 0))


_encode = json_encoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def digest(*parts: Json) -> str:
    """A 32-digit hexadecimal name for JSON values, the same on every machine.

    >>> digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    True
    """
    text = _encode(parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def seed_of(*parts: Json) -> int:
    """Return a 63-bit seed made of JSON values, the same on every machine."""
    return int(digest("seed", *parts)[:16], 16) >> 1


def storable(text: str) -> str:
    """Return text that can be written as UTF-8: lone surrogates, which a server may send, become ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


class SharedInstance:
    """A model or connections that copies of a program share, deep ones too; DSPy's optimizers copy programs."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus."""

    doc_id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Task:
    """What a program is run on, and what is known of it. A question is a task with one text input.

    Attributes:
        inputs: by the names of the program's arguments; a single one goes to the program's only argument.
        gold: ids of the relevant documents; may be empty. Read by rewards and evaluation alone.
        answers: reference answers, any of which is right; may be empty.
        type: bridge, comparison ...; with ``hops`` for breaking results down.
        split: the data set's own, where it has one.
        relevance: grades of the gold documents where the data grade them; nDCG alone looks at it.
    """

    id: str
    inputs: Mapping[str, Json] = field(hash=False)
    gold: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    type: str | None = None
    hops: int | None = None
    split: str | None = None
    relevance: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def question(
        cls,
        id: str,
        text: str,
        answer: str | None = None,
        gold: Iterable[str] = (),
        type: str | None = None,
        hops: int | None = None,
        split: str | None = None,
        relevance: Mapping[str, int] | None = None,
    ) -> Task:
        """A task with one text input, ``question``, and at most one reference answer."""
        answers = () if answer is None else (answer,)
        return cls(id, {"question": text}, tuple(gold), answers, type, hops, split, relevance or {})

    @property
    def text(self) -> str:
        """The only input, where it is a text; else all inputs as JSON, or the text that they say names them."""
        if not isinstance(self.inputs, dict) and hasattr(self.inputs, "text"):
            return str(self.inputs.text)
        values = list(self.inputs.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else _encode(self.inputs)

    @property
    def grades(self) -> dict[str, int]:
        """The gold documents with their grades, 1 where the data have none."""
        return {doc_id: self.relevance.get(doc_id, 1) for doc_id in self.gold}

    def is_solved_by(self, doc_ids: Sequence[str]) -> bool:
        """Whether nothing is left to find or to rank better: all gold documents, and only they, lead the ranking."""
        gold = set(self.gold)
        return bool(gold) and gold == set(doc_ids[: len(gold)])


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

_score = attrgetter("score")


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
    return tuple(sorted(best.values(), key=_score, reverse=True))  # stable all the same


class Candidate(NamedTuple):
    """What a program may pick: a chunk of a text, a passage, a mention, any item of a list.

    Attributes:
        id: names it among the candidates of a choice; in a store, the action that was taken.
        text: what an encoder reads, after the title where there is one.
        position: place in its document, from 0; None where candidates have no order.
        data: what feature functions look at beside.
    """

    id: str
    text: str
    title: str = ""
    position: float | None = None
    data: Mapping[str, Json] = {}


STOP = Candidate("[stop]", "")
"""The action that ends the picking."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a picker is asked: one of the candidates, in a context.

    Attributes:
        predictor: the name of the `leret.Pick` in the program.
        context: named values that the program gives (``question``), as it gives them.
        candidates: without those that were picked before; `STOP` is the last one where stopping is allowed.
        picked: before, in the order of picking.
    """

    predictor: str
    context: Mapping[str, Any]
    candidates: Sequence[Candidate]
    picked: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """A step's inputs, reached by the completions before it.

    Attributes:
        id: digest of (question id, predictor, messages), so that a group saw one prompt.
        step: LM calls before this one.
        messages: what the zero-shot prompt sends here: the prompt of every preference.
        parent: id of the sample that led here; None at the first step.
    """

    id: str
    task_id: str
    step: int
    predictor: str
    inputs: Mapping[str, Json]
    messages: tuple[Mapping[str, str], ...]
    parent: str | None = None

    @property
    def draw(self) -> str:
        """What random draws at the state depend on: its inputs, and not how a prompt words them."""
        return digest(self.task_id, self.predictor, self.inputs)


OUTAGES = ("policy", "retrieval", "program")
"""Kinds of failure that say nothing about the completion; the next resume tries such a sample again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward.

    ``kind`` is ``parse`` (the completion is not in the adapter's format: a fact about the policy, final), ``prompt``
    (it does not fit the model, final), ``policy``, ``retrieval`` or ``program`` (an outage or a crash: tried again at
    the next resume, never scored).
    """

    kind: str
    message: str

    @property
    def is_outage(self) -> bool:
        return self.kind in OUTAGES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action led to: all that a reward or a measure may look at. An outage is not an outcome.

    Attributes:
        text: what the policy wrote at this step.
        outputs: the fields parsed from it; empty where it does not parse.
        ranking: the union of all that was retrieved by the end of the step, best first.
        prediction: what the program returned; None where it goes on.
        n_steps: LM calls so far.
    """

    task: Task
    text: str = ""
    outputs: Mapping[str, Json] = field(default_factory=dict)
    ranking: Ranking = ()
    prediction: Any = None
    n_steps: int = 1

    @property
    def doc_ids(self) -> tuple[str, ...]:
        """Of the ranking, best first."""
        return tuple([passage.doc_id for passage in self.ranking])


@dataclass(frozen=True, slots=True)
class Sample:
    """One action at one state under one prompt of the bank, with what came of it. The action is a completion.

    Attributes:
        id: digest of all that asked for it: state, prompt, index, seed, sampling settings, policy.
        prompt: name of the prompt in the bank ("0" is zero-shot).
        outputs: the fields parsed from the completion.
        doc_ids: the accumulated ranking after this step, best first.
        scores: the retriever's scores of ``doc_ids``.
        reward: any real number; None exactly when ``failure`` is set. A completion that does not parse stays in its
            group with a failure of kind ``parse``, so that an algorithm may put a price on it.
        components: named parts of the reward (``step`` and ``final`` where both count), and measures beside it
            (``recall``). ``sampled`` is 0 at a predictor that is not sampled; the reward is 0 then, and says nothing.
            ``q`` and ``logp`` are a picker's Q-value and log-probability of the choice.
    """

    id: str
    state_id: str
    task_id: str
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

    @property
    def is_sampled(self) -> bool:
        """Whether its predictor is sampled, so that it can be learnt from."""
        return self.components.get("sampled") != 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The policy and settings of all samples that one prompt of the bank gets at a state in one round."""

    policy: str
    policy_digest: str
    prompt_digest: str
    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LMCall:
    """One step of a rollout.

    Attributes:
        messages: what was sent, under the rollout's prompt; empty where nothing was (a rule or a picker answered).
        completion: what the policy wrote; None for a system without an LM.
        outputs: the fields parsed from it; None where it does not parse.
        value: a picker's Q-value of what it chose.
    """

    predictor: str
    inputs: Mapping[str, Json]
    messages: tuple[Mapping[str, str], ...]
    completion: str | None
    outputs: Mapping[str, Json] | None
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Hop:
    """One search of a rollout, whatever number of LM calls led to it.

    Attributes:
        queries: several where `leret.Search` was called with a list.
        ranking: the union of all that was retrieved by the end of this search, best first.
        n_steps: LM calls before it.
    """

    queries: tuple[str, ...]
    ranking: Ranking
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program on one task, without branching.

    Attributes:
        finished: the program returned; ``prediction`` is what it returned.
        failure: why it did not.
        index: which of several runs on the same task.
        steps: the LM calls, also those that no search follows.
    """

    task_id: str
    hops: tuple[Hop, ...]
    finished: bool
    failure: Failure | None = None
    prediction: Any = None
    index: int = 0
    steps: tuple[LMCall, ...] = ()

    @property
    def ranking(self) -> Ranking:
        """All that was retrieved."""
        return self.hops[-1].ranking if self.hops else ()

    @property
    def unparsed(self) -> bool:
        """Whether the last completion was not in the adapter's format, and ended the run there."""
        return self.failure is not None and self.failure.kind == "parse"

    @property
    def error(self) -> str | None:
        """What kept the run from ending otherwise than by an unparsed completion: not the system's result."""
        return None if self.failure is None or self.unparsed else f"{self.failure.kind}: {self.failure.message}"
