"""Client of search servers, for four protocols.

===============  ==========================================================================================
``leret``        ``leret serve retriever``: POST /search {queries, k}; responses contain the index digest
``colbert``      ColBERT's server, used by ``dspy.ColBERTv2``: POST {query, k}, one query per request
``colbert-get``  ColBERT's server, with GET ?query=&k=
``retrieve``     servers of search-RL projects: POST /retrieve {queries, topk, return_scores}
===============  ==========================================================================================

A response that lacks the list of passages, or the id or score of a passage, is malformed. The
request is then retried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.http.client import MALFORMED, Answer, Call, HttpError, RejectedError, one_line
from leret.http.endpoints import ApiKey, RateLimit
from leret.retrieval.base import CallableRetriever, Documents, clip_k, has_terms
from leret.retrieval.clients.base import SearchClient, rankings_of

DocIdSource = Literal["id", "title", "row"]


_Values = tuple[Any, Any, Any, Any, Any]
"""Id, title, text, score and parent of a passage; parent is None if unknown."""


@dataclass(frozen=True)
class SearchProtocol:
    """Requests and responses of one protocol."""

    batched: bool  # allows several queries per request
    call: Callable[[Sequence[str], int], Call]  # builds a request from queries and k
    rankings: Callable[[Answer], list[Any]]  # returns one list of rows per query
    values: Callable[[Mapping[str, Any]], _Values]

    def read(
        self, answer: Answer, n_queries: int, k: int, doc_id_from: DocIdSource = "id"
    ) -> list[Ranking]:
        """Parse a response into rankings of at most ``k`` passages.

        Raise RetryableError if it is malformed.

        A passage's doc_id is its title or the server's id (``doc_id_from``). With ``"row"``, that
        id is a row number, which the caller replaces.
        """
        lists = self.rankings(answer)
        if len(lists) != n_queries:
            raise answer.malformed(f"{len(lists)} rankings for {n_queries} queries")
        rankings = []
        for rows in lists:
            if not isinstance(rows, list):
                raise answer.malformed("a ranking that is not a list")
            passages: dict[str, Passage] = {}
            for row in rows[:k]:
                passage = self._passage(row, doc_id_from, answer)
                passages.setdefault(passage.doc_id, passage)
            rankings.append(tuple(passages.values()))
        return rankings

    def _passage(self, row: Any, doc_id_from: DocIdSource, answer: Answer) -> Passage:
        try:
            server_id, title, text, score, parent = self.values(row)
            doc_id = title if doc_id_from == "title" else server_id
            if isinstance(doc_id, bool) or not isinstance(doc_id, str | int) or doc_id == "":
                missing = "title" if doc_id_from == "title" else "id"
                raise ValueError(
                    f"the document has no {missing}; set retriever.doc_id to another field"
                )
            if not isinstance(title, str) or not isinstance(text, str):
                raise TypeError("the title or text is not a string")
            is_number = isinstance(score, int | float) and not isinstance(score, bool)
            if not is_number or not math.isfinite(score):
                raise ValueError(f"the score {score!r} is not a finite number")
            if parent is not None and not isinstance(parent, str):
                raise TypeError("the parent is not a string")
            return Passage(str(doc_id), title, text, float(score), parent)
        except MALFORMED as error:
            what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise answer.malformed(f"an invalid passage ({one_line(what)})") from error


def split_passage(text: str) -> tuple[str, str]:
    r"""Split a passage into title and text.

    Formats: ``Title | text``, or ``"Title"`` on the first line.

    >>> split_passage("Ed Wood | A film."), split_passage('"Ed Wood"\nA film.'), split_passage("A film.")
    (('Ed Wood', 'A film.'), ('Ed Wood', 'A film.'), ('', 'A film.'))
    """
    first, line, rest = text.partition("\n")
    if line and len(first) > 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    title, bar, body = text.partition(" | ")
    if bar and "\n" not in title:
        return title.strip(), body
    return "", text


def _colbert_values(row: Mapping[str, Any]) -> _Values:
    whole = row["text"] if "text" in row else row["long_text"]
    title, text = split_passage(whole)
    if isinstance(row.get("title"), str):
        title = row["title"]
        text = whole.removeprefix(f"{title} | ") if title else whole
    doc_id = row["doc_id"] if "doc_id" in row else row["pid"]
    return doc_id, title, text, row["score"], None


def _retrieve_values(row: Mapping[str, Any]) -> _Values:
    document = row["document"]
    if "text" in document:
        title = document.get("title", "")
        text = document["text"]
    else:
        title, text = split_passage(document["contents"])
        title = document.get("title", title)
    doc_id = document.get("id", document.get("doc_id", ""))
    return doc_id, title, text, row["score"], None


def _list(answer: Answer, key: str) -> list[Any]:
    body = answer.json
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, list):
        raise answer.malformed(f"a response without a list {key!r}")
    return value


def _leret_values(row: Mapping[str, Any]) -> _Values:
    return row["doc_id"], row["title"], row["text"], row["score"], row.get("parent")


def _one_ranking(answer: Answer) -> list[Any]:
    return [_list(answer, "topk")]


PROTOCOLS = {
    "leret": SearchProtocol(
        batched=True,
        call=lambda queries, k: Call("POST", "/search", json={"queries": [*queries], "k": k}),
        rankings=partial(_list, key="rankings"),
        values=_leret_values,
    ),
    "colbert": SearchProtocol(
        batched=False,
        call=lambda queries, k: Call("POST", json={"query": queries[0], "k": k}),
        rankings=_one_ranking,
        values=_colbert_values,
    ),
    "colbert-get": SearchProtocol(
        batched=False,
        call=lambda queries, k: Call("GET", "", {"query": queries[0], "k": str(k)}),
        rankings=_one_ranking,
        values=_colbert_values,
    ),
    "retrieve": SearchProtocol(
        batched=True,
        call=lambda queries, k: Call(
            "POST", json={"queries": [*queries], "topk": k, "return_scores": True}
        ),
        rankings=partial(_list, key="result"),
        values=_retrieve_values,
    ),
}
"""Protocols by ``retriever.protocol``."""

_ABOUT_A_QUERY = frozenset({200, 400, 413, 422})
"""Statuses after which a batch is split: a single query or the batch size may be the cause.

200: the response was larger than `leret.http.client.MAX_BYTES`.
"""


class ServerInfo(BaseModel, frozen=True):
    """Response of a ``leret`` server to GET /health."""

    engine: str
    index: str  # digest of the retriever
    corpus: str | None  # digest of the corpus, if the retriever has a corpus
    documents: int | None  # number of documents, if known
    max_queries: PositiveInt | None = None  # maximum number of queries per request, if known


class Remote(CallableRetriever, SharedInstance):
    """Search over HTTP.

    ``corpus`` is the corpus that the server should search. With protocol ``leret``, a server of a
    different corpus is refused. With ``doc_id: row``, returned row numbers are replaced by the ids
    of ``corpus``.
    """

    def __init__(self, settings: RemoteSettings, corpus: Documents | None = None) -> None:
        self._settings = settings
        self._protocol = PROTOCOLS[settings.protocol]
        self._corpus = corpus
        if settings.doc_id == "row" and corpus is None:
            raise RetrievalError(
                "retriever.doc_id is row, but there is no corpus to look up rows in; "
                "set data.corpus"
            )
        self._ids = tuple(corpus or ()) if settings.doc_id == "row" else ()
        self._is_leret = settings.protocol == "leret"
        urls: Sequence[str] = settings.urls
        if self._is_leret:
            urls = [url.rstrip("/").removesuffix("/search") for url in settings.urls]
        key = ApiKey.from_env(settings.token_env, "retriever.token_env")
        rate = RateLimit(settings.requests_per_s) if settings.requests_per_s else None
        self._client = SearchClient(urls, settings, key=key, rate=rate)
        self.close = self._client.close
        self._accept_empty = self._is_leret
        if settings.accept_empty is not None:
            self._accept_empty = settings.accept_empty
        self._info: ServerInfo | None = None

    @property
    def digest(self) -> str:
        """Digest of ``doc_id`` and the served index.

        If the server names no index, ``name`` or URLs stand for it.
        """
        settings = self._settings
        if not self._is_leret:
            index_name = settings.name or sorted(self._client.urls)
            return digest("remote", settings.protocol, settings.doc_id, index_name)
        index = self.info().index
        if settings.doc_id == "id":
            return index
        return digest("remote", index, settings.doc_id)

    @property
    def names_its_index(self) -> bool:
        """Return whether the digest identifies the served index; a digest of URLs does not."""
        return self._is_leret or self._settings.name is not None

    def info(self) -> ServerInfo:
        """Return a ``leret`` server's description, requested once.

        Raise RetrievalError if its corpus is different.
        """
        if self._info is None:
            info = self._client.ask((Call("GET", "/health"), _read_info))
            wanted = None if self._corpus is None else self._corpus.digest
            if wanted is not None and info.corpus is not None and info.corpus != wanted:
                raise RetrievalError(
                    f"{self._client.urls[0]} serves an index of a different corpus "
                    f"({info.documents} documents, digest {info.corpus}; data.corpus has "
                    f"{len(self._corpus or ())} documents, digest {wanted}); "
                    "change data.corpus, or serve an index of data.corpus"
                )
            self._info = info
        return self._info

    def check(self) -> None:
        """Raise RetrievalError if the server does not answer in this protocol.

        Retry while the server restarts.
        """
        if self._is_leret:
            self.info()
        else:
            read = partial(self._protocol.read, n_queries=1, k=1, doc_id_from=self._settings.doc_id)
            self._client.ask((self._protocol.call(["health"], 1), read))

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        A refused batch is split until only the bad queries fail.
        """
        k = clip_k(k, k)
        asked = [i for i, query in enumerate(queries) if has_terms(query)]
        batch_size = self._settings.queries_per_request if self._protocol.batched else 1
        if self._is_leret:
            batch_size = min(batch_size, self.info().max_queries or batch_size)
        starts = range(0, len(asked), batch_size)
        batches = [asked[start : start + batch_size] for start in starts]
        outcomes: list[Ranking | HttpError] = [()] * len(queries)
        while batches:
            questions = []
            for batch in batches:
                call = self._protocol.call([queries[i] for i in batch], k)
                read = partial(self._read, n_queries=len(batch), k=k)
                questions.append((call, read))
            halves: list[list[int]] = []
            for batch, answer in zip(batches, self._client.ask_each(questions), strict=True):
                is_rejected = isinstance(answer, RejectedError) and answer.status in _ABOUT_A_QUERY
                if is_rejected and len(batch) > 1:
                    middle = len(batch) // 2
                    halves += [batch[:middle], batch[middle:]]
                    continue
                for n, i in enumerate(batch):
                    outcomes[i] = answer if isinstance(answer, HttpError) else answer[n]
            batches = halves
        return rankings_of(queries, outcomes)

    def _read(self, answer: Answer, n_queries: int, k: int) -> list[Ranking]:
        rankings = self._protocol.read(
            answer, n_queries=n_queries, k=k, doc_id_from=self._settings.doc_id
        )
        if self._info is not None:
            index = answer.json.get("index")
            if index != self._info.index:
                raise RejectedError(
                    f"{answer.url} serves a different index ({index}) than at the start of this "
                    f"run ({self._info.index}); a run cannot mix rankings from two indexes: "
                    "serve the first index again, or start a new run",
                    409,
                )
        if not self._accept_empty and not all(rankings):
            raise answer.malformed(
                "an empty ranking (if that is correct, set retriever.accept_empty: true)"
            )
        if not self._ids:
            return rankings
        return [self._with_corpus_ids(ranking, answer) for ranking in rankings]

    def _with_corpus_ids(self, ranking: Ranking, answer: Answer) -> Ranking:
        passages = []
        for passage in ranking:
            row = int(passage.doc_id) if passage.doc_id.isdecimal() else -1
            if not 0 <= row < len(self._ids):
                raise answer.malformed(
                    f"row {passage.doc_id!r}, but the corpus has {len(self._ids)} documents "
                    "(serve the same corpus, or change retriever.doc_id)"
                )
            passages.append(passage._replace(doc_id=self._ids[row]))
        return tuple(passages)


def _read_info(answer: Answer) -> ServerInfo:
    body: Any = answer.json
    if isinstance(body, dict) and "status" in body and "index" not in body:
        raise RejectedError(
            f"{answer.url} did not describe its index: it expects a different token "
            "(check retriever.token_env or --token-env), or it is not `leret serve retriever`",
            401,
        )
    try:
        return ServerInfo.model_validate(body)
    except ValidationError as error:
        raise answer.malformed(f"an invalid /health response ({one_line(repr(error))})") from error
