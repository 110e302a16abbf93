"""Requests of a program on its way: LM calls, searches, or nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import AdapterParseError, lm15
from leret.core.types import Choice, Ranking, json_encoder, merge
from leret.programs.search import SearchCall
from leret.retrieval.base import Retriever

PLAIN = (str, int, float, bool, type(None))
"""Types of values that are JSON without conversion."""

REPEATABLE = (
    "let it depend on its inputs, completions and searches alone (wrap a search with leret.search_tool), and keep "
    "nothing on itself: no cache, counter, demo or LM that forward sets"
)
"""Advice for a program that does not come to the same place again."""

_encode = json_encoder(sort_keys=True)
_in_order = json_encoder(ensure_ascii=False)
_CHOICE = dspy.Signature("candidates -> id")
encode_sorted = json_encoder(sort_keys=True)


@dataclass(eq=False)
class PredictorCall:
    """One call of an LM, as the program makes it.

    Attributes:
        predictor: name in ``program.named_predictors()``; in parentheses if the program makes the predictor on the way.
        usual: the predictor's own signature and demos under the run's adapter, without settings for this call.
        wording: instructions other than the predictor's.
        request: a call that bypassed the adapter, and so has no adapter and signature here.
        choice: candidates, for a call of a `leret.Pick`.
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
    choice: ClassVar[Choice | None] = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The inputs as JSON values."""
        fields = self.inputs if self.signature is None else self.signature.input_fields
        return {name: plain_json(value) for name, value in self.inputs.items() if name in fields}

    @cached_property
    def key(self) -> str:
        """The question as JSON."""
        return encode_sorted((self.predictor, self.values, plain_json(self.config), self.wording))

    def asks_as(self, other: PredictorCall) -> bool:
        """Check whether another call asks the same."""
        same = self.predictor == other.predictor and self.wording == other.wording and self.config == other.config
        return same and (self.inputs == other.inputs or self.key == other.key)


@dataclass(frozen=True, slots=True)
class Step:
    """A completion, as the program sees it.

    Attributes:
        call: the question. Equal calls take their steps in order.
        outputs: fields by the adapter; an AdapterParseError if the completion does not parse.
    """

    call: PredictorCall
    outputs: list[dict[str, Any]] | AdapterParseError
    text: str | None = None


@dataclass(frozen=True, slots=True)
class NeedsCompletion:
    """The program stands at a call that has no completion yet.

    Attributes:
        searches: searches before it, in order.
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
        """The candidates for a picker; None if a text is needed."""
        return self.call.choice


@dataclass(frozen=True, slots=True)
class NeedsSearch:
    """The program stands at a search that has no answer yet.

    Attributes:
        key: key of the answer in the results.
        query: query for ``retriever``, or for the run's retriever if that is None; ``k`` passages.
        ask: makes the answer if the search is a tool; the other fields are empty then.
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
        """The union of all retrieved passages."""
        return merge(added for search in self.searches for added in search.added)

    @property
    def unparsed(self) -> bool:
        """True if the program ended in an unparsed completion that it does not handle."""
        return isinstance(self.prediction, AdapterParseError)


def tool_key(name: str, arguments: Any) -> tuple[str, str]:
    """Return the key of a search tool's result."""
    return name, encode_sorted(plain_json(arguments))


def order(need: NeedsCompletion | NeedsSearch) -> tuple[Any, ...]:
    """Return a sort key by which the same one of parallel branches always continues: searches first, then calls."""
    if isinstance(need, NeedsSearch):
        return 0, "", repr(need.key)
    return 1, need.predictor, need.key


def plain_json(value: Any) -> Any:
    """Return a JSON value that names a question; functions become their names, since addresses change."""
    if type(value) in PLAIN:
        return value
    return to_jsonable_python(value, fallback=_name, inf_nan_mode="strings", serialize_unknown=False)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
