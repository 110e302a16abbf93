"""Search servers: protocols, queries per request, and the handling of refused requests.

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
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.http.client import MALFORMED, Answer, Call, HttpError, RejectedError, one_line
from leret.http.endpoints import ApiKey, RateLimit
from leret.retrieval.base import CallableRetriever, Documents, clip_k, has_terms
from leret.retrieval.clients.base import SearchClient, rankings_of

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
        rankings = []
        for entries in lists:
            if not isinstance(entries, list):
                raise answer.malformed("a ranking that is not a list")
            passages: dict[str, Passage] = {}
            for entry in entries[:k]:
                passage = self._passage(entry, named, answer)
                passages.setdefault(passage.doc_id, passage)
            rankings.append(tuple(passages.values()))
        return rankings

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

_ABOUT_A_QUERY = frozenset({200, 400, 413, 422})
"""Statuses of refused batches that may pass in halves: one query or the size was at fault. 200: a bad answer."""


class Served(BaseModel, frozen=True):
    """Answer of a ``leret`` server under /health."""

    engine: str
    index: str  # digest of the served retriever
    corpus: str | None  # digest of its corpus, if it has one
    documents: int | None  # number of documents, if known
    max_queries: PositiveInt | None = None  # most queries per request, if known


class Remote(CallableRetriever, SharedInstance):
    """Search over HTTP.

    ``corpus`` is the corpus that the server should search: protocol ``leret`` compares its digest, ``doc_id: row``
    takes ids from its order.
    """

    def __init__(self, settings: RemoteSettings, corpus: Documents | None = None) -> None:
        self._settings = settings
        self._protocol = PROTOCOLS[settings.protocol]
        self._corpus = corpus
        if settings.doc_id == "row" and corpus is None:
            raise RetrievalError("retriever.doc_id is row, but there is no corpus to count rows in")
        self._ids = tuple(corpus or ()) if settings.doc_id == "row" else ()
        self._is_leret = settings.protocol == "leret"
        urls = [url.rstrip("/").removesuffix("/search") if self._is_leret else url for url in settings.urls]
        self._client = SearchClient(
            urls,
            settings,
            key=ApiKey.from_env(settings.token_env, "retriever.token_env"),
            rate=RateLimit(settings.requests_per_s) if settings.requests_per_s else None,
        )
        self.close = self._client.close
        self._accept_empty = settings.accept_empty if settings.accept_empty is not None else self._is_leret
        self._served: Served | None = None

    @property
    def digest(self) -> str:
        """Digest of the served index and of ``doc_id``; without protocol ``leret``, of the name or the URLs."""
        settings = self._settings
        if self._is_leret:
            index = self.served().index
            return index if settings.doc_id == "id" else digest("remote", index, settings.doc_id)
        named = settings.name or sorted(self._client.urls)
        return digest("remote", settings.protocol, settings.doc_id, named)

    @property
    def names_its_index(self) -> bool:
        """Return whether the digest changes with the served index; that of URLs alone does not."""
        return self._is_leret or self._settings.name is not None

    def served(self) -> Served:
        """Return a ``leret`` server's description, asked once; refuse a server of another corpus."""
        if self._served is None:
            served = self._client.ask((Call("GET", "/health"), _served))
            wanted = None if self._corpus is None else self._corpus.digest
            if wanted is not None and served.corpus is not None and served.corpus != wanted:
                raise RetrievalError(
                    f"{self._client.urls[0]} serves an index of another corpus ({served.documents} documents, digest "
                    f"{served.corpus}; data.corpus has {len(self._corpus or ())}, digest {wanted}); serve the right one"
                )
            self._served = served
        return self._served

    def check(self) -> None:
        """Check that a server answers in this protocol; wait for one that is being restarted."""
        if self._is_leret:
            self.served()
        else:
            read = partial(self._protocol.read, n_queries=1, k=1, named=self._settings.doc_id)
            self._client.ask((self._protocol.call(["health"], 1), read))

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents; in a refused batch, only the queries fail that are refused alone."""
        k = clip_k(k, k)
        asked = [i for i, query in enumerate(queries) if has_terms(query)]
        most = self._settings.queries_per_request if self._protocol.batched else 1
        if self._is_leret:
            most = min(most, self.served().max_queries or most)
        batches = [asked[start : start + most] for start in range(0, len(asked), most)]
        outcomes: list[Ranking | HttpError] = [()] * len(queries)
        while batches:
            questions = [
                (self._protocol.call([queries[i] for i in batch], k), partial(self._read, n_queries=len(batch), k=k))
                for batch in batches
            ]
            again: list[list[int]] = []
            for batch, answer in zip(batches, self._client.ask_each(questions), strict=True):
                if len(batch) > 1 and isinstance(answer, RejectedError) and answer.status in _ABOUT_A_QUERY:
                    again += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
                    continue
                for n, place in enumerate(batch):
                    outcomes[place] = answer if isinstance(answer, HttpError) else answer[n]
            batches = again
        return rankings_of(queries, outcomes)

    def _read(self, answer: Answer, n_queries: int, k: int) -> list[Ranking]:
        rankings = self._protocol.read(answer, n_queries=n_queries, k=k, named=self._settings.doc_id)
        if self._served is not None and (index := answer.json.get("index")) != self._served.index:
            raise RejectedError(
                f"{answer.url} serves another index ({index}) than at the start of this run "
                f"({self._served.index}); rankings of two indexes cannot be mixed: serve the first one again, or start "
                "a new run",
                409,
            )
        if not self._accept_empty and not all(rankings):
            raise answer.malformed("an empty ranking (if that is an answer, set retriever.accept_empty: true)")
        return [self._named(ranking, answer) for ranking in rankings] if self._ids else rankings

    def _named(self, ranking: Ranking, answer: Answer) -> Ranking:
        passages = []
        for passage in ranking:
            row = int(passage.doc_id) if passage.doc_id.isdecimal() else -1
            if not 0 <= row < len(self._ids):
                raise answer.malformed(
                    f"row {passage.doc_id!r} of a corpus of {len(self._ids)} documents (another corpus is served, or "
                    "documents are named differently: retriever.doc_id)"
                )
            passages.append(Passage(self._ids[row], passage.title, passage.text, passage.score))
        return tuple(passages)


def _served(answer: Answer) -> Served:
    body: Any = answer.json
    if isinstance(body, dict) and "status" in body and "index" not in body:
        raise RejectedError(
            f"{answer.url} does not describe its index: it expects another token (name its variable with "
            "retriever.token_env or --token-env), or is not `leret serve retriever`",
            401,
        )
    try:
        return Served.model_validate(body)
    except ValidationError as error:
        raise answer.malformed(f"not a /health answer of `leret serve retriever` ({one_line(repr(error))})") from error
