"""What a command's INDEX names: an index directory, or the URL of a server."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from leret.core.errors import ConfigError
from leret.retrieval.base import Retriever
from leret.retrieval.index.documents import DOCUMENT_FILES, StoredDocuments


@dataclass(frozen=True)
class Opened:
    """A retriever, and what it says of itself.

    Attributes:
        corpus: digest of its corpus; None where it has none.
        documents: in its corpus; None where nobody can count them.
    """

    retriever: Retriever
    engine: str
    corpus: str | None
    documents: int | None
    directory: Path | None = None

    def ids(self) -> Container[str] | None:
        """Ids of its documents; None where they cannot be listed from here."""
        if self.directory is None or self.corpus is None or not (self.directory / DOCUMENT_FILES[0]).is_file():
            return None
        return frozenset(StoredDocuments(self.directory, self.corpus))


def opened(index: str, *, token_env: str | None = None, retry_for_s: float = 30.0) -> Opened:
    """Open an index directory, or connect to a ``leret`` server.

    Args:
        index: a directory, or a URL.
        token_env: environment variable that holds the server's bearer token.
        retry_for_s: how long a server that does not answer is waited for.

    Raises:
        ConfigError: the URL is none or holds a password, or the variable is not set.
        RetrievalError: there is no index, it is broken, or the server does not answer.
    """
    if index.startswith(("http://", "https://")):
        from leret.config.retriever import RemoteSettings
        from leret.retrieval.clients.leret import Remote

        if "@" in index:
            raise ConfigError(
                "the server's URL holds no user and no password; put the token in a variable (--token-env)"
            )
        remote = Remote(RemoteSettings(urls=(index,), token_env=token_env, retry_for_s=retry_for_s))
        served = remote.served()
        return Opened(remote, served.engine, served.corpus, served.documents)
    from leret.retrieval.engines.colbert_index import Downloaded
    from leret.retrieval.index.manifest import read_manifest
    from leret.retrieval.load import open_index

    if Downloaded.is_one(Path(index)):
        return Opened(open_index(index), "colbert", None, None)
    manifest = read_manifest(Path(index))
    return Opened(open_index(index), manifest.engine, manifest.corpus, manifest.documents, Path(index))
