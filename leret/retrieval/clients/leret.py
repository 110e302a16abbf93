"""Search servers: queries per request, and the handling of refused requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.http.client import Answer, Call, HttpError, RejectedError, one_line
from leret.http.endpoints import ApiKey, RateLimit
from leret.retrieval.base import CallableRetriever, Documents, clip_k, has_terms
from leret.retrieval.clients.base import SearchClient, rankings_of
from leret.retrieval.clients.protocols import PROTOCOLS

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
        most = self._most_queries()
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

    def _most_queries(self) -> int:
        if not self._protocol.batched:
            return 1
        wished = self._settings.queries_per_request
        allowed = self.served().max_queries if self._is_leret else None
        return wished if allowed is None else min(wished, allowed)

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
