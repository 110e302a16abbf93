"""JSON requests and answers of the retrieval server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StrictInt, ValidationError

from leret.core.errors import LeretError
from leret.core.types import Passage, Ranking
from leret.retrieval.base import to_valid_utf8


class BadRequestError(Exception):
    """A malformed request, or one beyond the limits."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    max_k: int  # documents per query
    max_queries: int
    max_documents: int  # queries times k


def _number(value: Any) -> Any:
    """Convert the text of a URL's value; null stands for the default."""
    if value is None:
        return 10
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


Query = Annotated[str, BeforeValidator(lambda value: to_valid_utf8(value) if isinstance(value, str) else value)]
CutOff = Annotated[StrictInt, BeforeValidator(_number), Field(ge=1)]


class SingleRequest(BaseModel):
    """A request in ColBERT's protocol, by URL or JSON."""

    query: Query
    k: CutOff = 10

    @property
    def queries(self) -> list[str]:
        return [self.query]


class BatchRequest(BaseModel):
    """A request in protocol ``leret``, or with ``topk`` for ``k`` in that of the search-RL projects."""

    queries: list[Query]
    k: CutOff = Field(10, validation_alias=AliasChoices("k", "topk"))
    return_scores: bool = False


R = TypeVar("R", SingleRequest, BatchRequest)


def parse(values: Any, model: type[R], limits: Limits) -> R:
    """Read a request; BadRequestError if a key is missing or wrong, or a limit is exceeded."""
    if not isinstance(values, Mapping):
        raise BadRequestError("the request is not a JSON object")
    try:
        asked = model.model_validate(dict(values))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise BadRequestError(f"{key}: {fault['msg'].lower()}, not {str(fault['input'])[:40]!r}") from error
    n = len(asked.queries)
    if asked.k > limits.max_k:
        raise BadRequestError(f"k: {str(asked.k)[:40]}; this server takes numbers from 1 to {limits.max_k}")
    if n > limits.max_queries:
        raise BadRequestError(f"queries: {n}; this server takes {limits.max_queries} per request")
    if n * asked.k > limits.max_documents:
        raise BadRequestError(
            f"queries: {n} with k {asked.k} are {n * asked.k} documents; this server takes "
            f"{limits.max_documents} per request: send fewer queries or a smaller k"
        )
    return asked


def encode(value: Any) -> bytes:
    """Encode a value as JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise LeretError(f"the engine returned a score that is not a number ({error})").failed() from error


def leret_answer(rankings: list[Ranking], index: str) -> bytes:
    """Encode rankings in protocol ``leret``."""
    return _with_lists({"index": index}, "rankings", ([p._asdict() for p in ranking] for ranking in rankings))


def colbert_answer(ranking: Ranking) -> bytes:
    """Encode a ranking in ColBERT's protocol; clients read either ``text`` or ``long_text``."""
    highest = max((passage.score for passage in ranking), default=0.0)
    weights = [math.exp(passage.score - highest) for passage in ranking]
    total = sum(weights)
    topk = []
    for rank, (passage, weight) in enumerate(zip(ranking, weights, strict=True), 1):
        text = f"{passage.title} | {passage.text}" if passage.title else passage.text
        topk.append(
            {
                "pid": passage.doc_id,
                "title": passage.title,
                "text": text,
                "long_text": text,
                "score": passage.score,
                "rank": rank,
                "prob": weight / total,
            }
        )
    return encode({"topk": topk})


def retrieve_answer(rankings: list[Ranking], with_scores: bool) -> bytes:
    """Encode rankings in the search-RL projects' protocol: the title in quotes on the first line of ``contents``."""

    def entry(passage: Passage) -> dict[str, Any]:
        contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
        document = {"id": passage.doc_id, "title": passage.title, "text": passage.text, "contents": contents}
        return {"document": document, "score": passage.score} if with_scores else document

    return _with_lists({}, "result", ([entry(p) for p in ranking] for ranking in rankings))


def _with_lists(facts: dict[str, Any], name: str, lists: Iterable[list[Any]]) -> bytes:
    """Encode ``facts`` with the lists under ``name``, one at a time: other threads wait while one is encoded."""
    begun = encode({**facts, name: []}).removesuffix(b"]}")
    return begun + b",".join(map(encode, lists)) + b"]}"
