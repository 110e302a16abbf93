"""What a program asks for on its way: LM calls, choices, searches, or nothing more; and how two such places differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import AdapterParseError, lm15
from leret.core.errors import ProgramError
from leret.core.types import STOP, Candidate, Choice, Ranking, json_encoder, merge
from leret.programs.search import SearchCall
from leret.retrieval.base import Retriever

PLAIN = (str, int, float, bool, type(None))
"""Values that are JSON as they are."""

REPEATABLE = (
    "let it depend on its inputs, completions and searches alone (wrap a search with leret.search_tool), and keep "
    "nothing on itself: no cache, counter, demo or LM that forward sets"
)
"""Advice for a program that does not come to the same place again."""

_encode = json_encoder(sort_keys=True)
_in_order = json_encoder(ensure_ascii=False)
_CHOICE = dspy.Signature("candidates -> id")


@dataclass(eq=False)
class PredictorCall:
    """One call of an LM, as the program makes it.

    Attributes:
        predictor: its name in ``program.named_predictors()``; in parentheses where the program makes it on the way.
        usual: the predictor's own signature and demos, the run's adapter, no settings of the call's own.
        wording: instructions that are not the predictor's own.
        request: of a call that passed the adapter by, and has no adapter and signature here.
    """

    predictor: str
    inputs: Mapping[str, Any]
    usual: bool = False
    adapter: dspy.Adapter | None = None
    lm: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    signature: Any = None
    wording: str = ""
    demos: Sequence[Mapping[str, Any]] = ()
    request: lm15.Request | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The inputs as JSON values."""
        fields = self.inputs if self.signature is None else self.signature.input_fields
        return {name: _json(value) for name, value in self.inputs.items() if name in fields}

    @cached_property
    def key(self) -> str:
        """What is asked, as JSON."""
        return _encode((self.predictor, self.values, _json(self.config), self.wording))

    def asks_as(self, other: PredictorCall) -> bool:
        """Whether another call asks the same."""
        same = self.predictor == other.predictor and self.wording == other.wording and self.config == other.config
        return same and (self.inputs == other.inputs or self.key == other.key)


@dataclass(frozen=True)
class Candidates:
    """What one call of a `leret.Pick` is given, its ids checked; ProgramError where two are the same."""

    items: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        if len(self.by_id) < len(self.items) or STOP.id in self.by_id:
            counts = Counter([*(one.id for one in self.items), STOP.id])
            raise ProgramError(f"two candidates of a Pick have the id {max(counts, key=counts.__getitem__)!r}")

    @cached_property
    def by_id(self) -> dict[str, Candidate]:
        return {one.id: one for one in self.items}

    @cached_property
    def text(self) -> str:
        """Their texts by id, as JSON."""
        return _in_order({a.id: f"{a.title} | {a.text}" if a.title else a.text for a in self.items})


@dataclass(eq=False, kw_only=True)
class ChoiceCall(PredictorCall):
    """One question of a `leret.Pick`; ``inputs`` are its context."""

    candidates: Candidates
    picked: tuple[Candidate, ...] = ()
    stop: bool = False

    @cached_property
    def choice(self) -> Choice:
        """As a picker is asked."""
        left: Sequence[Candidate] = self.candidates.items
        if self.picked:
            left = [one for one in left if one.id not in self.picked_ids]
        return Choice(self.predictor, self.inputs, (*left, STOP) if self.stop else left, self.picked)

    @cached_property
    def picked_ids(self) -> dict[str, None]:
        """In the order of picking."""
        return {one.id: None for one in self.picked}

    @property
    def is_open(self) -> bool:
        """Whether anything but stopping is left to choose."""
        return len(self.candidates.items) > sum(name in self.candidates.by_id for name in self.picked_ids)

    def chosen(self, text: str) -> Candidate:
        """What an answer names; AdapterParseError where that is nothing that may be picked."""
        name = text.strip().strip('"')
        if name == STOP.id and self.stop:
            return STOP
        found = self.candidates.by_id.get(name)
        if found is None or name in self.picked_ids:
            raise AdapterParseError(
                "Pick", _CHOICE, text, f"{name[:80]!r} is the id of no candidate of {self.predictor}"
            )
        return found

    @cached_property
    def context(self) -> dict[str, Any]:
        return {name: _json(value) for name, value in self.inputs.items()}

    @cached_property
    def values(self) -> dict[str, Any]:
        """Context and ids; the candidates' texts stand in the message."""
        return self.context | {"candidates": list(self.candidates.by_id), "picked": list(self.picked_ids)}

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The question in words, for a policy that writes."""
        asked = _in_order({**self.context, "picked": list(self.picked_ids)})
        stop = f", or with {STOP.id} to pick no more" if self.stop else ""
        rest = f"Answer with the id of one of the candidates that are not picked yet{stop}."
        return ({"role": "user", "content": f'{asked[:-1]}, "candidates": {self.candidates.text}}}\n{rest}'},)

    @cached_property
    def key(self) -> str:
        return f"{self.predictor} {self.messages[0]['content']}"

    def asks_as(self, other: PredictorCall) -> bool:
        """Whether another call asks the same; of equal candidates, without a text of them."""
        if not isinstance(other, ChoiceCall) or self.predictor != other.predictor or self.stop != other.stop:
            return False
        same = self.picked == other.picked and self.candidates == other.candidates
        return same and (self.inputs == other.inputs or self.context == other.context)


@dataclass(frozen=True, slots=True)
class Step:
    """A completion, as the program sees it.

    Attributes:
        call: what was asked. Equal calls take their steps in order.
        outputs: of the adapter; an AdapterParseError where the completion does not parse.
    """

    call: PredictorCall
    outputs: list[dict[str, Any]] | AdapterParseError
    text: str | None = None
    is_nested: bool = field(init=False)  # outputs hold more than plain values, which a program could change

    def __post_init__(self) -> None:
        outputs = () if isinstance(self.outputs, Exception) else self.outputs
        nested = any(type(value) not in PLAIN for fields in outputs for value in fields.values())
        object.__setattr__(self, "is_nested", nested)


@dataclass(frozen=True, slots=True)
class NeedsCompletion:
    """The program stands at a call that has no completion yet.

    Attributes:
        searches: those before it, in order.
    """

    call: PredictorCall
    searches: tuple[SearchCall, ...]

    @property
    def predictor(self) -> str:
        return self.call.predictor

    @property
    def inputs(self) -> Mapping[str, Any]:
        """JSON values by field name."""
        return self.call.values

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def choice(self) -> Choice | None:
        """What a picker is asked; None where a text is needed."""
        return None

    @property
    def ranking(self) -> Ranking:
        """The union of what was retrieved before this step."""
        return merge(added for search in self.searches for added in search.added)


@dataclass(frozen=True, slots=True)
class NeedsChoice(NeedsCompletion):
    """The program stands at a choice: a completion is the id of one of the candidates."""

    call: ChoiceCall

    @property
    def choice(self) -> Choice:
        return self.call.choice


def need_of(call: PredictorCall, searches: tuple[SearchCall, ...]) -> NeedsCompletion:
    """What a program needs that stands at a call."""
    return NeedsChoice(call, searches) if isinstance(call, ChoiceCall) else NeedsCompletion(call, searches)


@dataclass(frozen=True, slots=True)
class NeedsSearch:
    """The program stands at a search whose answer is not known yet.

    Attributes:
        key: where the answer belongs in the results.
        query: with ``k``, for ``retriever``, or for the run's where that is None.
        ask: makes the answer where the search is a tool; the other fields are empty then.
    """

    key: Any
    query: str = ""
    k: int = 0
    retriever: Retriever | None = None
    ask: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The program returned ``prediction``, or ended in the AdapterParseError of its last completion."""

    prediction: Any
    searches: tuple[SearchCall, ...]

    @property
    def ranking(self) -> Ranking:
        return merge(added for search in self.searches for added in search.added)

    @property
    def unparsed(self) -> bool:
        """Whether the program ended in a completion that does not parse, which it does not handle."""
        return isinstance(self.prediction, AdapterParseError)


def tool_key(name: str, arguments: Any) -> tuple[str, str]:
    """Where a search tool's result belongs in the results."""
    return name, _encode(_json(arguments))


def order(need: NeedsCompletion | NeedsSearch) -> tuple[Any, ...]:
    """Searches first, then calls by name and inputs: of branches side by side, always the same one goes on."""
    if isinstance(need, NeedsSearch):
        return 0, "", repr(need.key)
    return 1, need.predictor, need.key


def place(need: NeedsCompletion | NeedsSearch | Finished) -> Any:
    """Where a program stands, as a value that can be compared."""
    if isinstance(need, NeedsSearch):
        return need.key
    found = [[passage.doc_id for passage in added] for search in need.searches for added in search.added]
    if isinstance(need, NeedsCompletion):
        return need.key, found
    value = need.prediction
    return repr(value) if isinstance(value, Exception) else _encode(_json(_fields(value))), found


def difference(before: NeedsCompletion | NeedsSearch | Finished, now: NeedsCompletion | NeedsSearch | Finished) -> str:
    """What differs between two places that should be one, with both values."""
    if isinstance(before, NeedsCompletion) and isinstance(now, NeedsCompletion) and before.predictor == now.predictor:
        if before.key != now.key:
            return _changed(before.predictor, before.inputs, now.inputs)
        return f"the searches before {before.predictor} found {place(before)[1]} and then {place(now)[1]}"
    return f"it came to {_shown(before)} and then to {_shown(now)}"


def _shown(need: NeedsCompletion | NeedsSearch | Finished) -> str:
    match need:
        case NeedsCompletion():
            return f"a call of {need.predictor} for {_short(need.inputs)}"
        case NeedsSearch():
            return f"a search for {_short(need.key)}"
        case Finished():
            return f"its end with {_short(_json(_fields(need.prediction)))}"


def _changed(predictor: str, before: Any, now: Any) -> str:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{predictor} was asked {_short(before)}, and on the same path {_short(now)}"
    name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if name is None:
        return f"{predictor} was called in other ways with the same inputs"
    return f"{predictor}.{name} was {_short(before.get(name))}, and on the same path {_short(now.get(name))}"


def _fields(prediction: Any) -> Any:
    return dict(prediction.items()) if isinstance(prediction, dspy.Example) else prediction


def asked_instead(step: Step, needs: Iterable[NeedsCompletion | NeedsSearch]) -> str:
    """What a program does where a step of its path is recorded."""
    name = step.call.predictor
    now = next((need.inputs for need in needs if isinstance(need, NeedsCompletion) and need.predictor == name), None)
    if now is None:
        return f"{name} was asked for {_short(step.call.values)}, and is no longer on the same path"
    return _changed(name, step.call.values, now)


def _json(value: Any) -> Any:
    """A JSON value that names what was asked; functions by their names, since addresses change."""
    if type(value) in PLAIN:
        return value
    return to_jsonable_python(value, fallback=_name, inf_nan_mode="strings", serialize_unknown=False)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _short(value: Any) -> str:
    text = _encode(_json(value))
    return text if len(text) <= 160 else f"{text[:160]}..."
