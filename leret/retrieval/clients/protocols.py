"""Protocols of search servers: requests for queries, and rankings from answers.

===============  ==========================================================================================
``leret``        ``leret serve retriever``: POST /search {queries, k}; the answer names its index
``colbert``      ColBERT's server, as used by ``dspy.ColBERTv2``: POST {query, k}, one query per request
``colbert-get``  the same by GET ?query=&k=
``retrieve``     the search-RL projects': POST /retrieve {queries, topk, return_scores}
===============  ==========================================================================================

An answer without a list, a name or a score is malformed, and the request is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from leret.core.types import Passage, Ranking
from leret.http.client import MALFORMED, Answer, Call, one_line

Named = Literal["id", "title", "row"]


@dataclass(frozen=True)
class SearchProtocol:
    """One protocol."""

    batched: bool  # takes several queries per request
    call: Callable[[Sequence[str], int], Call]  # makes a request of queries and k
    rankings: Callable[[Answer], list[Any]]  # one list of entries per query
    entry: Callable[[Mapping[str, Any]], tuple[Any, Any, Any, Any]]  # id, title, text and score of an entry

    def read(self, answer: Answer, n_queries: int, k: int, named: Named = "id") -> list[Ranking]:
        """Return the rankings of an answer, at most ``k`` passages each; RetryableError if it is malformed.

        The id of a passage is its title or the server's id, which under ``row`` is still to be looked up.
        """
        lists = self.rankings(answer)
        if len(lists) != n_queries:
            raise answer.malformed(f"{len(lists)} rankings for {n_queries} queries")
        return [self._ranking(entries, k, named, answer) for entries in lists]

    def _ranking(self, entries: Any, k: int, named: Named, answer: Answer) -> Ranking:
        if not isinstance(entries, list):
            raise answer.malformed("a ranking that is not a list")
        passages: dict[str, Passage] = {}
        for entry in entries[:k]:
            passage = self._passage(entry, named, answer)
            passages.setdefault(passage.doc_id, passage)
        return tuple(passages.values())

    def _passage(self, entry: Any, named: Named, answer: Answer) -> Passage:
        try:
            server_id, title, text, score = self.entry(entry)
            doc_id = title if named == "title" else server_id
            if isinstance(doc_id, bool) or not isinstance(doc_id, str | int) or doc_id == "":
                missing = "title" if named == "title" else "id"
                raise ValueError(f"the document has no {missing}; retriever.doc_id selects its name")
            if not isinstance(title, str) or not isinstance(text, str):
                raise TypeError("its text is not a string")
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise ValueError(f"its score is {score!r}")
            return Passage(str(doc_id), title, text, float(score))
        except MALFORMED as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise answer.malformed(f"an invalid passage ({one_line(what)})") from error


def split_passage(text: str) -> tuple[str, str]:
    r"""Split a passage into title and text: ``Title | text``, or ``"Title"`` on the first line.

    >>> split_passage("Ed Wood | A film."), split_passage('"Ed Wood"\nA film.'), split_passage("A film.")
    (('Ed Wood', 'A film.'), ('Ed Wood', 'A film.'), ('', 'A film.'))
    """
    first, line, rest = text.partition("\n")
    if line and len(first) > 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    title, bar, body = text.partition(" | ")
    return (title.strip(), body) if bar and "\n" not in title else ("", text)


def _colbert_entry(entry: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    whole = entry["text"] if "text" in entry else entry["long_text"]
    title, text = split_passage(whole)
    if isinstance(entry.get("title"), str):
        title = entry["title"]
        text = whole.removeprefix(f"{title} | ") if title else whole
    return entry["doc_id"] if "doc_id" in entry else entry["pid"], title, text, entry["score"]


def _retrieve_entry(entry: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    document = entry["document"]
    if "text" in document:
        title, text = document.get("title", ""), document["text"]
    else:
        title, text = split_passage(document["contents"])
        title = document.get("title", title)
    return document.get("id", document.get("doc_id", "")), title, text, entry["score"]


def _list(answer: Answer, key: str) -> list[Any]:
    body = answer.json
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, list):
        raise answer.malformed(f"no list {key!r}")
    return value


_COLBERT = (lambda answer: [_list(answer, "topk")], _colbert_entry)

PROTOCOLS = {
    "leret": SearchProtocol(
        True,
        lambda queries, k: Call("POST", "/search", json={"queries": list(queries), "k": k}),
        lambda answer: _list(answer, "rankings"),
        itemgetter("doc_id", "title", "text", "score"),
    ),
    "colbert": SearchProtocol(False, lambda queries, k: Call("POST", json={"query": queries[0], "k": k}), *_COLBERT),
    "colbert-get": SearchProtocol(
        False, lambda queries, k: Call("GET", "", {"query": queries[0], "k": str(k)}), *_COLBERT
    ),
    "retrieve": SearchProtocol(
        True,
        lambda queries, k: Call("POST", "", json={"queries": list(queries), "topk": k, "return_scores": True}),
        lambda answer: _list(answer, "result"),
        _retrieve_entry,
    ),
}
"""Protocols by ``retriever.protocol``."""
