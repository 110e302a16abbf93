"""Plain, frozen values that the stages exchange."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

Json = Any
"""A value that ``json.dumps`` accepts."""


def json_encoder(**options: Any) -> Callable[[Json], str]:
    """Return ``json.dumps`` with these options. The encoder is built only once.

    >>> json_encoder(separators=(",", ":"))({"a": [1, None]})
    '{"a":[1,null]}'
    """
    return json.JSONEncoder(check_circular=False, **options).encode


_encode = json_encoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))
_hash = partial(hashlib.blake2b, digest_size=16)


def digest(*parts: Json) -> str:
    """Return a 32-digit hexadecimal digest of JSON values, identical on every machine.

    >>> digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    True
    """
    return _hash(_encode(parts).encode("utf-8", "surrogatepass")).hexdigest()


Message = Mapping[str, Any]
"""A chat message, as in OpenAI's API and chat templates; build one with `message`, and read one with `text_of`.

Native tool calls add keys: ``tool_calls`` of an assistant message, ``tool_call_id`` and ``name`` of a message with role
``tool``, and ``tools`` of the first message: the schemas of all tools, as JSON.
"""

Messages = tuple[Message, ...]
"""Messages in order, system message first."""


def message(role: str, text: str, **more: Json) -> dict[str, Any]:
    """Build a message; values None in ``more`` are left out."""
    return {
        "role": role,
        "content": text,
        **{name: value for name, value in more.items() if value is not None},
    }


def text_of(message: Message) -> str:
    """Return the text of a message."""
    return str(message["content"])


def seed_of(*parts: Json) -> int:
    """Return a 63-bit seed from JSON values, identical on every machine."""
    name = _hash(_encode(("seed", *parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(name[:8]) >> 1


def storable(text: str) -> str:
    """Replace lone surrogates, which a server may send, with ``?`` so that text can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


class SharedInstance:
    """An object (a model, connections) that deep copies of a program share, because DSPy optimizers copy programs."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus, or a chunk of a document."""

    doc_id: str
    title: str
    text: str
    parent: str | None = None  # id of the chunk's document


@dataclass(frozen=True, slots=True)
class Task:
    """Inputs for a program, with labels and metadata. A question is a task with one text input."""

    id: str
    # by argument name; a single input goes to a program's only argument
    inputs: Mapping[str, Json] = field(hash=False)
    gold: tuple[str, ...] = ()  # ids of the relevant documents, read only by rewards and evaluation
    answers: tuple[str, ...] = ()  # reference answers, all equally correct
    type: str | None = None  # bridge, comparison ...; reports group results by type and ``hops``
    hops: int | None = None
    split: str | None = None  # the data set's split; None if leret splits the data
    # Grades of gold documents, for nDCG.
    relevance: Mapping[str, int] = field(default_factory=dict, hash=False)
    parents: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Parent by chunk, for the whole corpus, if ``gold`` holds parents (`data.gold: parent`); else empty."""

    @classmethod
    def question(
        cls,
        id: str,
        text: str,
        answer: str | None = None,
        gold: Iterable[str] = (),
        type: str | None = None,
        hops: int | None = None,
        **labels: Any,
    ) -> Task:
        """Build a task with one text input, ``question``, and at most one reference answer."""
        answers = () if answer is None else (answer,)
        return cls(id, {"question": text}, tuple(gold), answers, type, hops, **labels)

    @property
    def text(self) -> str:
        """The ``text`` attribute of ``inputs``, if any; else the only input, if it is text; else all inputs as JSON."""
        if not isinstance(self.inputs, dict) and hasattr(self.inputs, "text"):
            return str(self.inputs.text)
        values = list(self.inputs.values())
        return (
            values[0] if len(values) == 1 and isinstance(values[0], str) else _encode(self.inputs)
        )

    @property
    def grades(self) -> dict[str, int]:
        """Grades by gold document; 1 for a document without a grade in the data."""
        return {doc_id: self.relevance.get(doc_id, 1) for doc_id in self.gold}

    def gold_ids(self, doc_ids: Sequence[str]) -> Sequence[str]:
        """Return the ids to compare with ``gold``: with ``parents``, each parent once, at the rank of its first chunk.

        >>> Task("q", {}, gold=("a",), parents={"a#0": "a", "a#1": "a"}).gold_ids(["b", "a#1", "a#0"])
        ['b', 'a']
        """
        if not self.parents:
            return doc_ids
        parents = [self.parents.get(doc_id, doc_id) for doc_id in doc_ids]
        return list(dict.fromkeys(parents))

    def is_solved_by(self, doc_ids: Sequence[str]) -> bool:
        """Check whether the ranking starts with all gold documents, so that no search can improve it."""
        gold = set(self.gold)
        return bool(gold) and gold == set(self.gold_ids(doc_ids)[: len(gold)])


# A named tuple, because leret builds millions of passages, and a frozen dataclass takes twice as long.
class Passage(NamedTuple):
    """A document in a ranking; a higher ``score`` is better."""

    doc_id: str
    title: str
    text: str
    score: float
    parent: str | None = None  # id of the chunk's document


Ranking = tuple[Passage, ...]
"""Passages, best first, without duplicate documents."""

_score = attrgetter("score")


def merge(rankings: Iterable[Sequence[Passage]]) -> Ranking:
    """Merge rankings by score. A document keeps its best score, and ties keep their order.

    >>> a, b = Passage("a", "", "", 2.0), Passage("b", "", "", 3.0)
    >>> [p.doc_id for p in merge([[a], [b, a]])]
    ['b', 'a']
    """
    best: dict[str, Passage] = {}
    for ranking in rankings:
        for passage in ranking:
            previous = best.get(passage.doc_id)
            if previous is None or passage.score > previous.score:
                best[passage.doc_id] = passage
    ordered = sorted(best.values(), key=_score, reverse=True)  # ``reverse`` does not reorder ties
    return tuple(ordered)


class Candidate(NamedTuple):
    """An item that a program may pick: a text chunk, a passage, a mention.

    Encoders read the title, if any, and then the text.
    """

    id: str  # unique among the candidates of a choice; stored as the action
    text: str
    title: str = ""
    position: float | None = None  # position in the document, from 0; None if unordered
    data: Mapping[str, Json] = {}  # additional values for feature functions


STOP = Candidate("[stop]", "")
"""Action that ends an episode of picks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A picker's input: candidates and their context."""

    predictor: str  # name of the `leret.Pick` in the program
    context: Mapping[str, Any]  # values from the program by name (``question``), unchanged
    # candidates not picked yet; `STOP` is last if stopping is allowed
    candidates: Sequence[Candidate]
    picked: tuple[Candidate, ...] = ()  # earlier picks, in order


@dataclass(frozen=True, slots=True)
class State:
    """A program step reached after earlier completions, with its inputs."""

    id: str  # digest of (task id, predictor, messages), so all samples of a group share a prompt
    task_id: str
    step: int  # number of LM calls before this one
    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages  # messages of the zero-shot prompt, which every preference pair uses
    parent: str | None = None  # id of the sample that led here; None at the first step

    @property
    def draw(self) -> str:
        """Seed for random draws at this state. It depends on the inputs, not on the prompt's wording."""
        return digest(self.task_id, self.predictor, self.inputs)


OUTAGES = ("policy", "retrieval", "program")
"""Kinds of failure that leret never scores. On resume, leret retries samples with these failures."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a sample has no reward."""

    kind: str  # parse (completion not in the adapter's format), prompt (too long for the model), or one of `OUTAGES`
    message: str

    @property
    def is_outage(self) -> bool:
        return self.kind in OUTAGES


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action, with everything that a reward or a measure may read. Not built after an outage."""

    task: Task
    text: str = ""  # the policy's completion at this step
    # fields parsed from ``text``; empty if parsing fails
    outputs: Mapping[str, Json] = field(default_factory=dict)
    ranking: Ranking = ()  # all passages retrieved by the end of the step, merged, best first
    prediction: Any = None  # the program's return value; None before it returns
    n_steps: int = 1  # number of LM calls so far
    # ranked document ids of each query, up to the rewards' ``depth``
    deep: tuple[tuple[str, ...], ...] = ()

    @property
    def doc_ids(self) -> tuple[str, ...]:
        return tuple([passage.doc_id for passage in self.ranking])


@dataclass(frozen=True, slots=True)
class Sample:
    """One action (a completion) at one state under one prompt of the bank, with its result.

    An unparsed completion stays in its group with a failure of kind ``parse``, so an algorithm can give it a reward.
    ``components`` holds named parts of the reward (``step`` and ``final`` with ``credit: both``), other measures
    (``recall``), and the Q-value (``q``) and log-probability (``logp``) of a picker's choice. ``sampled`` is 0 if the
    predictor is not sampled; the reward of 0 is then a placeholder.
    """

    id: str  # digest of state, prompt, index, seed, sampling settings and policy
    state_id: str
    task_id: str
    step: int
    prompt: str  # name of the prompt in the bank ("0" is zero-shot)
    index: int
    seed: int
    completion: str | None = None
    outputs: Mapping[str, Json] = field(default_factory=dict)
    doc_ids: tuple[str, ...] = ()  # ranking of all passages retrieved so far, best first
    scores: tuple[float, ...] = ()  # retriever scores of ``doc_ids``
    reward: float | None = None  # any real number; None if and only if ``failure`` is set
    components: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    n_prompt_tokens: int | None = None
    n_completion_tokens: int | None = None
    # of the completion, end token included; None if the server sends none
    token_ids: tuple[int, ...] | None = None
    # one per token, at temperature 1, with `sampling.token_ids`
    logprobs: tuple[float, ...] | None = None
    finish_reason: str | None = None  # stop, or length: cut at max_tokens; None if unknown

    @property
    def is_sampled(self) -> bool:
        return self.components.get("sampled") != 0

    @property
    def is_unparsed(self) -> bool:
        return self.failure is not None and self.failure.kind == "parse"

    @property
    def is_cut(self) -> bool:
        """True if ``max_tokens`` ended the completion, so that it has no end token."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Policy and sampling settings of a round. Its samples with the same state and bank prompt share them."""

    policy: str
    policy_digest: str
    prompt_digest: str
    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LMCall:
    """One step of a rollout: an LM call, a rule or a pick."""

    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages  # request with the rollout's prompt; empty for a rule or a picker
    completion: str | None  # None for a system without an LM
    outputs: Mapping[str, Json] | None  # fields parsed from the completion; None if parsing fails
    value: float | None = None  # Q-value of a picker's choice
    n_tokens: int = 0  # of the prompt and the completion


@dataclass(frozen=True, slots=True)
class Hop:
    """One search of a rollout, after ``n_steps`` LM calls."""

    queries: tuple[str, ...]  # more than one if `leret.Search` was called with a list
    ranking: Ranking  # all passages retrieved by the end of this search, merged, best first
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program on one task, without branching."""

    task_id: str
    hops: tuple[Hop, ...]
    failure: Failure | None = None  # why the program did not return
    prediction: Any = None
    index: int = 0  # index of the run among repeated runs on the task
    steps: tuple[LMCall, ...] = ()  # all LM calls, including those after the last search

    @property
    def ranking(self) -> Ranking:
        return self.hops[-1].ranking if self.hops else ()

    @property
    def unparsed(self) -> bool:
        """True if the run ended with a completion that could not be parsed."""
        return self.failure is not None and self.failure.kind == "parse"

    @property
    def error(self) -> str | None:
        """The failure as text, or None. An unparsed completion counts as the system's result, not as an error."""
        return (
            None
            if self.failure is None or self.unparsed
            else f"{self.failure.kind}: {self.failure.message}"
        )
