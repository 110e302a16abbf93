"""The values that the stages exchange: plain, frozen, without I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


def digest(*parts: Json) -> str:
    """Return a 32-digit hexadecimal name for JSON values, the same on every machine.

    >>> digest("q1", {"b": 1, "a": [2]}) == digest("q1", {"a": [2], "b": 1})
    True
    """
    text = _encode(parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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
    return int(digest("seed", *parts)[:16], 16) >> 1


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
    """The inputs of a program, and the known facts about them. A question is a task with one text input.

    Attributes:
        inputs: by argument of the program; a single input goes to the program's only argument.
        gold: ids of the relevant documents; may be empty. Only rewards and evaluation read it.
        answers: reference answers, each of them right; may be empty.
        type: bridge, comparison ...; reports group results by it and by ``hops``.
        split: as the data set names it; None if leret splits the data.
        relevance: grades of the gold documents if the data grade them; only nDCG reads it.
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


class Passage(NamedTuple):
    """A document in a ranking; a higher ``score`` is better.

    A named tuple, because leret builds millions of them and a frozen dataclass takes twice as long.
    """

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

    Attributes:
        id: unique among the candidates of a choice; the store keeps it as the action.
        text: an encoder reads the title, if any, then the text.
        position: place in its document, from 0; None if candidates have no order.
        data: further values for feature functions.
    """

    id: str
    text: str
    title: str = ""
    position: float | None = None
    data: Mapping[str, Json] = {}


STOP = Candidate("[stop]", "")
"""The action that ends an episode of picks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A picker's input: candidates and their context.

    Attributes:
        predictor: name of the `leret.Pick` in the program.
        context: named values from the program (``question``), unchanged.
        candidates: all that were not picked before; `STOP` comes last if stopping is allowed.
        picked: earlier picks, in order.
    """

    predictor: str
    context: Mapping[str, Any]
    candidates: Sequence[Candidate]
    picked: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The inputs of a step after some completions.

    Attributes:
        id: digest of (task id, predictor, messages), so that all samples of a group saw one prompt.
        step: number of LM calls before this one.
        messages: of the zero-shot prompt, which is the prompt of every preference.
        parent: id of the sample that led here; None at the first step.
    """

    id: str
    task_id: str
    step: int
    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages
    parent: str | None = None

    @property
    def draw(self) -> str:
        """Seed of random draws at the state: depends on its inputs, not on the wording of a prompt."""
        return digest(self.task_id, self.predictor, self.inputs)


OUTAGES = ("policy", "retrieval", "program")
"""Kinds of failure that leret never scores; the next resume tries such a sample again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a sample has no reward.

    ``kind`` is ``parse`` (the completion is not in the adapter's format), ``prompt`` (the prompt does not fit the
    model), or one of `OUTAGES`.
    """

    kind: str
    message: str

    @property
    def is_outage(self) -> bool:
        return self.kind in OUTAGES


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action, and all that a reward or a measure may read. An outage is not an outcome.

    Attributes:
        text: the policy's completion at this step.
        outputs: fields parsed from the completion; empty if it does not parse.
        ranking: union of all passages retrieved by the end of the step, best first.
        prediction: the program's return value; None before its end.
        n_steps: number of LM calls so far.
    """

    task: Task
    text: str = ""
    outputs: Mapping[str, Json] = field(default_factory=dict)
    ranking: Ranking = ()
    prediction: Any = None
    n_steps: int = 1

    @property
    def doc_ids(self) -> tuple[str, ...]:
        """Document ids of the ranking, best first."""
        return tuple([passage.doc_id for passage in self.ranking])


@dataclass(frozen=True, slots=True)
class Sample:
    """One action (a completion) at one state under one prompt of the bank, with its result.

    Attributes:
        id: digest of the request: state, prompt, index, seed, sampling settings, policy.
        prompt: name of the prompt in the bank ("0" is zero-shot).
        outputs: fields parsed from the completion.
        doc_ids: accumulated ranking after this step, best first.
        scores: the retriever's scores of ``doc_ids``.
        reward: any real number; None exactly when ``failure`` is set. A completion that does not parse stays in its
            group with a failure of kind ``parse``, so that an algorithm can give it a reward.
        components: named parts of the reward (``step`` and ``final`` if both count), and further measures
            (``recall``). ``sampled`` is 0 at a predictor that is not sampled, where the reward of 0 means nothing.
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
        messages: the request under the rollout's prompt; empty if a rule or a picker answered.
        completion: the policy's text; None for a system without an LM.
        outputs: fields parsed from the completion; None if it does not parse.
        value: a picker's Q-value of its choice.
    """

    predictor: str
    inputs: Mapping[str, Json]
    messages: Messages
    completion: str | None
    outputs: Mapping[str, Json] | None
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Hop:
    """One search of a rollout, after any number of LM calls.

    Attributes:
        queries: several if `leret.Search` was called with a list.
        ranking: union of all passages retrieved by the end of this search, best first.
        n_steps: number of LM calls before it.
    """

    queries: tuple[str, ...]
    ranking: Ranking
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program on one task, without branching.

    Attributes:
        finished: whether the program returned; ``prediction`` is its return value.
        failure: the reason if it did not.
        index: number of the run among several on the same task.
        steps: all LM calls, including those after the last search.
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
        return self.hops[-1].ranking if self.hops else ()

    @property
    def unparsed(self) -> bool:
        """True if the run ended with a completion that is not in the adapter's format."""
        return self.failure is not None and self.failure.kind == "parse"

    @property
    def error(self) -> str | None:
        """The failure, unless it is an unparsed completion, which counts as the system's result."""
        return None if self.failure is None or self.unparsed else f"{self.failure.kind}: {self.failure.message}"
