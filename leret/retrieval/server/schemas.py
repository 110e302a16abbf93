"""JSON requests and responses of the retrieval server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictInt,
    ValidationError,
)

from leret.config.base import Settings
from leret.core.errors import LeretError
from leret.core.types import Passage, Ranking
from leret.retrieval.base import to_valid_utf8


class BadRequestError(Exception):
    """The request is malformed or exceeds a limit."""


class ServerLimits(Settings):
    """Limits of a server, which ``leret serve retriever --set KEY=VALUE`` changes."""

    max_waiting: PositiveInt = 1024  # maximum number of queries in the queue, and in a request
    max_batch: PositiveInt = 64  # maximum number of queries per call to the engine
    max_k: PositiveInt = 1000  # maximum number of documents per query
    # maximum of queries x k; leret's client requests no more by default
    max_documents: PositiveInt = 64_000
    max_body: PositiveInt = 4 << 20  # maximum bytes of a request body
    read_s: PositiveFloat = 60.0  # seconds until reading a request body times out
    drain_s: NonNegativeFloat = 10.0  # seconds to answer pending requests when the server stops


class ServerSettings(ServerLimits):
    """Access rules and limits of a server."""

    # None: no token, but requests must address localhost, `host` or an IP address
    token: str | None = Field(None, repr=False)
    host: str = "localhost"  # host name of the server, in addition to localhost


def _number(value: Any) -> Any:
    """Convert digits from a URL to int. Null becomes 10, the default ``k``."""
    if value is None:
        return 10
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value


Query = Annotated[
    str, BeforeValidator(lambda value: to_valid_utf8(value) if isinstance(value, str) else value)
]
CutOff = Annotated[StrictInt, BeforeValidator(_number), Field(ge=1)]


class SingleRequest(BaseModel):
    """Request in ColBERT's protocol, from a URL or JSON."""

    query: Query
    k: CutOff = 10

    @property
    def queries(self) -> list[str]:
        return [self.query]


class BatchRequest(BaseModel):
    """Request in the ``leret`` or ``retrieve`` protocol (with ``topk`` instead of ``k``)."""

    queries: list[Query]
    k: CutOff = Field(10, validation_alias=AliasChoices("k", "topk"))
    return_scores: bool = False


R = TypeVar("R", SingleRequest, BatchRequest)


def parse(values: Any, model: type[R], limits: ServerSettings) -> R:
    """Parse a request.

    Raise BadRequestError if a key is missing or invalid, or if a limit is exceeded.
    """
    if not isinstance(values, Mapping):
        raise BadRequestError("the request body is not a JSON object")
    try:
        asked = model.model_validate(dict(values))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise BadRequestError(
            f"{key}: {fault['msg'].lower()}, not {str(fault['input'])[:40]!r}"
        ) from error
    n = len(asked.queries)
    if asked.k > limits.max_k:
        raise BadRequestError(f"k is {str(asked.k)[:40]}; the maximum is {limits.max_k}")
    if n > limits.max_waiting:
        raise BadRequestError(f"{n} queries in one request; the maximum is {limits.max_waiting}")
    if n * asked.k > limits.max_documents:
        raise BadRequestError(
            f"{n} queries with k {asked.k} request {n * asked.k} documents; "
            f"the maximum is {limits.max_documents}: "
            "send fewer queries or a smaller k"
        )
    return asked


def encode(value: Any) -> bytes:
    """Encode a value as JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise LeretError(
            f"the engine returned a score that is not a number ({error})"
        ).failed() from error


def leret_answer(rankings: list[Ranking], index: str) -> bytes:
    """Encode rankings in the ``leret`` protocol."""
    lists = (list(map(Passage._asdict, ranking)) for ranking in rankings)
    return _with_lists({"index": index}, "rankings", lists)


def colbert_answer(ranking: Ranking) -> bytes:
    """Encode a ranking in ColBERT's protocol. Clients read either ``text`` or ``long_text``."""
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
    """Encode rankings in the ``retrieve`` protocol.

    ``contents`` is a line with the quoted title, then the text.
    """

    def row(passage: Passage) -> dict[str, Any]:
        contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
        document = {
            "id": passage.doc_id,
            "title": passage.title,
            "text": passage.text,
            "contents": contents,
        }
        return {"document": document, "score": passage.score} if with_scores else document

    lists = (list(map(row, ranking)) for ranking in rankings)
    return _with_lists({}, "result", lists)


def _with_lists(values: dict[str, Any], name: str, lists: Iterable[list[Any]]) -> bytes:
    """Encode ``values`` plus ``lists`` as the value of ``name``.

    The GIL is released after each list.
    """
    begun = encode({**values, name: []}).removesuffix(b"]}")
    return begun + b",".join(map(encode, lists)) + b"]}"
