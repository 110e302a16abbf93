"""Requests and answers of the retrieval server, in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from leret.core.errors import LeretError
from leret.core.types import Passage, Ranking


class BadRequestError(Exception):
    """A request that says what it wants in a way that cannot be understood."""


@dataclass(frozen=True)
class Limits:
    """What a request may ask.

    Attributes:
        max_k: documents a query.
        max_queries: queries a request.
        max_documents: queries times k of a request.
    """

    max_k: int
    max_queries: int
    max_documents: int


@dataclass(frozen=True)
class Asked:
    """What a request asks."""

    queries: tuple[str, ...]
    k: int


def one_asked(values: Mapping[str, Any], limits: Limits, default_k: int = 10) -> Asked:
    """A request of ColBERT's protocol: ``query`` and ``k``, from a URL or from JSON.

    Raises:
        BadRequestError: either is missing or wrong.
    """
    query = values.get("query")
    if not isinstance(query, str):
        raise BadRequestError('query is missing; send ?query=TEXT&k=10, or the JSON {"query": TEXT, "k": 10}')
    return Asked((query,), _k(values.get("k"), "k", limits, default_k))


def batch_asked(values: Any, limits: Limits, k_name: str, default_k: int = 10) -> Asked:
    """A request with several queries, in JSON.

    Args:
        values: the request's JSON.
        limits: of the server.
        k_name: ``k``, or ``topk``.
        default_k: where ``k`` is missing or null.

    Raises:
        BadRequestError: the queries or the cut-off are missing or wrong, or ask for too much.
    """
    queries = values.get("queries") if isinstance(values, Mapping) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequestError(f'queries is no list of texts; send {{"queries": [TEXT, ...], "{k_name}": 10}}')
    if len(queries) > limits.max_queries:
        raise BadRequestError(f"{len(queries)} queries at once; this server takes {limits.max_queries} a request")
    k = _k(values.get(k_name), k_name, limits, default_k)
    if len(queries) * k > limits.max_documents:
        raise BadRequestError(
            f"{len(queries)} queries with {k_name} {k} ask for {len(queries) * k} documents; this server takes "
            f"{limits.max_documents} a request: send fewer queries at once, or a smaller {k_name}"
        )
    return Asked(tuple(queries), k)


def encoded(value: Any) -> bytes:
    """A value's JSON.

    Raises:
        LeretError: a number is none, which JSON cannot say.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise LeretError(f"the engine gave a score that is no number ({error})").failed() from error


def leret_answer(rankings: list[Ranking], index: str) -> bytes:
    """Protocol ``leret``."""
    lists = (
        [{"doc_id": p.doc_id, "title": p.title, "text": p.text, "score": p.score} for p in ranking]
        for ranking in rankings
    )
    return _with_lists({"index": index}, "rankings", lists)


def colbert_answer(ranking: Ranking) -> bytes:
    """ColBERT's protocol. ``text`` and ``long_text`` are both there: clients read one or the other."""
    probabilities = _softmax([passage.score for passage in ranking])
    topk = []
    for rank, (passage, probability) in enumerate(zip(ranking, probabilities, strict=True), 1):
        text = _whole(passage)
        topk.append(
            {
                "pid": passage.doc_id,
                "title": passage.title,
                "text": text,
                "long_text": text,
                "score": passage.score,
                "rank": rank,
                "prob": probability,
            }
        )
    return encoded({"topk": topk})


def retrieve_answer(rankings: list[Ranking], with_scores: bool) -> bytes:
    """The search-RL projects' protocol: the title in quotes on the first line of ``contents``."""

    def document(passage: Passage) -> dict[str, Any]:
        contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
        return {"id": passage.doc_id, "title": passage.title, "text": passage.text, "contents": contents}

    def entry(passage: Passage) -> dict[str, Any]:
        return {"document": document(passage), "score": passage.score} if with_scores else document(passage)

    return _with_lists({}, "result", ([entry(p) for p in ranking] for ranking in rankings))


def _with_lists(facts: dict[str, Any], name: str, lists: Iterable[list[Any]]) -> bytes:
    """``facts`` and, under ``name``, the lists; one at a time, for other threads stand still while one is encoded."""
    begun = encoded({**facts, name: []}).removesuffix(b"]}")
    return begun + b",".join(map(encoded, lists)) + b"]}"


def _k(value: Any, name: str, limits: Limits, default: int) -> int:
    if value is None:
        value = default
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limits.max_k:
        raise BadRequestError(f"{name} is {str(value)[:40]!r}; it is a whole number from 1 to {limits.max_k}")
    return value


def _whole(passage: Passage) -> str:
    return f"{passage.title} | {passage.text}" if passage.title else passage.text


def _softmax(scores: list[float]) -> list[float]:
    highest = max(scores, default=0.0)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
