"""The values that the stages exchange: plain, frozen, without I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

Json = Any
"""A value that ``json.dumps`` takes."""


def json_encoder(**options: Any) -> Callable[[Json], str]:
    """Return ``json.dumps`` with these options, which builds its encoder only once.

    >>> json_encoder(separators=(",", ":"))({"a": [1, None]})
    '{"a":[1,null]}'
    """
    return json.JSONEncoder(check_circular=False, **options).encode


_encode = json_encoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))
_hash = partial(hashlib.blake2b, digest_size=16)


def digest(*parts: Json) -> str:
    """Return a 32-digit hexadecimal name for JSON values, the same on every machine.

    >>> digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    True
    """
    return _hash(_encode(parts).encode("utf-8", "surrogatepass")).hexdigest()


Message = Mapping[str, Any]
"""One message of a chat, as in OpenAI's API and chat templates; build it by `message`, and read it by `text_of`."""

Messages = tuple[Message, ...]
"""Messages in order, the system's first."""


def message(role: str, text: str) -> dict[str, Any]:
    """Build a message; text is the only kind of content."""
    return {"role": role, "content": text}


def text_of(message: Message) -> str:
    """Return the text of a message."""
    return str(message["content"])


def seed_of(*parts: Json) -> int:
    """Return a 63-bit seed made of JSON values, the same on every machine."""
    name = _hash(_encode(("seed", *parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(name[:8]) >> 1


def storable(text: str) -> str:
    """Return text that can be written as UTF-8: lone surrogates, which a server may send, become ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


class SharedInstance:
    """An object (a model, connections) that deep copies of a program share; DSPy's optimizers copy programs."""

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
    """The inputs of a program, and the known facts about them. A question is a task with one text input."""

    id: str
    inputs: Mapping[str, Json] = field(hash=False)  # by argument of the program; one input goes to its only argument
    gold: tuple[str, ...] = ()  # ids of the relevant documents; only rewards and evaluation read it
    answers: tuple[str, ...] = ()  # reference answers, each of them right
    type: str | None = None  # bridge, comparison ...; reports group results by it and by ``hops``
    hops: int | None = None
    split: str | None = None  # as the data set names it; None if leret splits the data
    relevance: Mapping[str, int] = field(default_factory=dict, hash=False)  # grades of gold documents, for nDCG

    @classmethod
    def question(
        cls,
        id: str,
        text: str,
        answer: str | None = None,
        gold: Iterable[str] = (),
        type: str | None = None,
        hops: int | None = None,
        **facts: Any,
    ) -> Task:
        """Build a task with one text input, ``question``, and at most one reference answer."""
        answers = () if answer is None else (answer,)
        return cls(id, {"question": text}, tuple(gold), answers, type, hops, **facts)

    @property
    def text(self) -> str:
        """The only input if it is text, else the text that names the inputs, else all inputs as JSON."""
        if not isinstance(self.inputs, dict) and hasattr(self.inputs, "text"):
            return str(self.inputs.text)
        values = list(self.inputs.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else _encode(self.inputs)

    @property
    def grades(self) -> dict[str, int]:
        """Grades of the gold documents; 1 without grades in the data."""
        return {doc_id: self.relevance.get(doc_id, 1) for doc_id in self.gold}

    def is_solved_by(self, doc_ids: Sequence[str]) -> bool:
        """Check that all gold documents lead the ranking: nothing is left to find or to rank better."""
        gold = set(self.gold)
        return bool(gold) and gold == set(doc_ids[: len(gold)])


class Passage(NamedTuple):  # leret builds millions of them; a frozen dataclass takes twice as long
    """A document in a ranking; a higher ``score`` is better."""

    doc_id: str
    title: str
    text: str
    score: float


Ranking = tuple[Passage, ...]
"""Passages, best first, each document once."""

_score = attrgetter("score")


def merge(rankings: Iterable[Sequence[Passage]]) -> Ranking:
    """Merge rankings by score: a document keeps its best score, and ties keep their order.

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
    return tuple(sorted(best.values(), key=_score, reverse=True))  # reverse keeps ties in order


class Candidate(NamedTuple):
    """An item that a program may pick: a chunk of a text, a passage, a mention.

    An encoder reads the title, if any, then the text.
    """

    id: str  # unique among the candidates of a choice; the store keeps it as the action
    text: str
    title: str = ""
    position: float | None = None  # place in its document, from 0; None if candidates have no order
    data: Mapping[str, Json] = {}  # further values for feature functions


STOP = Candidate("[stop]", "")
"""The action that ends an episode of picks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A picker's input: candidates and their context."""

    predictor: str  # name of the `leret.Pick` in the program
    context: Mapping[str, Any]  # named values from the program (``question``), unchanged
    candidates: Sequence[Candidate]  # all that were not picked before; `STOP` comes last if stopping is allowed
    picked: tuple[Candidate, ...] = ()  # earlier picks, in order


@dataclass(frozen=True, slots=True)
class State:
    """The inputs of a step after some completions."""

    id: str  # digest of (task id, predictor, messages), so that all samples of a group saw one prompt
    task_id: str
    step: int  # number of LM calls before this one
    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages  # of the zero-shot prompt, which is the prompt of every preference
    parent: str | None = None  # id of the sample that led here; None at the first step

    @property
    def draw(self) -> str:
        """Seed of random draws at the state: depends on its inputs, not on the wording of a prompt."""
        return digest(self.task_id, self.predictor, self.inputs)


OUTAGES = ("policy", "retrieval", "program")
"""Kinds of failure that leret never scores; the next resume tries such a sample again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a sample has no reward."""

    kind: str  # parse (the completion has another format), prompt (too long for the model), or one of `OUTAGES`
    message: str

    @property
    def is_outage(self) -> bool:
        return self.kind in OUTAGES


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action, and all that a reward or a measure may read. An outage is not an outcome."""

    task: Task
    text: str = ""  # the policy's completion at this step
    outputs: Mapping[str, Json] = field(default_factory=dict)  # fields parsed from it; empty if it does not parse
    ranking: Ranking = ()  # union of all passages retrieved by the end of the step, best first
    prediction: Any = None  # the program's return value; None before its end
    n_steps: int = 1  # number of LM calls so far
    deep: tuple[tuple[str, ...], ...] = ()  # ids of each query of the step, to the ``depth`` of a reward's settings

    @property
    def doc_ids(self) -> tuple[str, ...]:
        return tuple([passage.doc_id for passage in self.ranking])


@dataclass(frozen=True, slots=True)
class Sample:
    """One action (a completion) at one state under one prompt of the bank, with its result.

    A completion that does not parse stays in its group with a failure of kind ``parse``, so that an algorithm can give
    it a reward. ``components`` are named parts of the reward (``step`` and ``final`` if both count), and further
    measures (``recall``). ``sampled`` is 0 at a predictor that is not sampled, where the reward of 0 means nothing.
    ``q`` and ``logp`` are a picker's Q-value and log-probability of the choice.
    """

    id: str  # digest of the request: state, prompt, index, seed, sampling settings, policy
    state_id: str
    task_id: str
    step: int
    prompt: str  # name of the prompt in the bank ("0" is zero-shot)
    index: int
    seed: int
    completion: str | None = None
    outputs: Mapping[str, Json] = field(default_factory=dict)
    doc_ids: tuple[str, ...] = ()  # accumulated ranking after this step, best first
    scores: tuple[float, ...] = ()  # of ``doc_ids``, by the retriever
    reward: float | None = None  # any real number; None exactly when ``failure`` is set
    components: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    n_prompt_tokens: int | None = None
    n_completion_tokens: int | None = None

    @property
    def is_sampled(self) -> bool:
        return self.components.get("sampled") != 0

    @property
    def is_unparsed(self) -> bool:
        return self.failure is not None and self.failure.kind == "parse"


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
    """One step of a rollout."""

    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages  # the request under the rollout's prompt; empty if a rule or a picker answered
    completion: str | None  # None for a system without an LM
    outputs: Mapping[str, Json] | None  # fields parsed from the completion; None if it does not parse
    value: float | None = None  # a picker's Q-value of its choice


@dataclass(frozen=True, slots=True)
class Hop:
    """One search of a rollout, after ``n_steps`` LM calls."""

    queries: tuple[str, ...]  # several if `leret.Search` was called with a list
    ranking: Ranking  # union of all passages retrieved by the end of this search, best first
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program on one task, without branching."""

    task_id: str
    hops: tuple[Hop, ...]
    finished: bool  # the program returned ``prediction``
    failure: Failure | None = None  # the reason if it did not
    prediction: Any = None
    index: int = 0  # number of the run among several on the same task
    steps: tuple[LMCall, ...] = ()  # all LM calls, including those after the last search

    @property
    def ranking(self) -> Ranking:
        return self.hops[-1].ranking if self.hops else ()

    @property
    def unparsed(self) -> bool:
        """True if the run ended with a completion that is not in the adapter's format."""
        return self.failure is not None and self.failure.kind == "parse"

    @property
    def error(self) -> str | None:
        """The failure, unless it is an unparsed completion, which counts as the system's result."""
        return None if self.failure is None or self.unparsed else f"{self.failure.kind}: {self.failure.message}"
