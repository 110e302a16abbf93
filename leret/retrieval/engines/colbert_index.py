"""Downloaded PLAID indexes with their collections, opened in place and unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.retrieval.base import Documents

_SMALL = 1 << 26  # bytes; only the size of a larger file goes into the digest
_SAMPLE = 200  # documents compared by their number of tokens
_EQUAL = 0.9  # share of them that must be equal: cleaning of texts before indexing changes a few
_PARTS = ("codes.pt", "residuals.pt", "metadata.json")  # files of a chunk, besides its doclens


@dataclass(frozen=True)
class PlaidIndex:
    """An index of colbert-ai."""

    directory: Path  # ``index_root`` / ``index_name``
    checkpoint: str  # that built it, from its metadata
    collection: Path | None  # inside it as named in its metadata, or beside it
    digest: str
    doc_maxlen: int | None  # tokens per document
    metadata: dict[str, Any]  # its metadata.json

    @staticmethod
    def exists(directory: Path) -> bool:
        return (directory / "metadata.json").is_file() and (directory / "centroids.pt").is_file()

    @classmethod
    def open(cls, directory: Path) -> PlaidIndex:
        try:
            metadata = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
            if not isinstance(metadata, dict) or "num_chunks" not in metadata:
                raise ValueError("num_chunks is missing")
        except (OSError, ValueError, RecursionError) as error:
            raise RetrievalError(
                f"{directory} is not a ColBERT index ({error}); index_root and index_name name its folder"
            ) from error
        config = metadata["config"] if isinstance(metadata.get("config"), dict) else {}
        named = _inside(directory, config.get("collection"))
        beside = [folder / "collection.tsv" for folder in (directory, directory.parent, directory.parent.parent)]
        collection = next((path for path in (named, *beside) if path is not None and path.is_file()), None)
        checkpoint, maxlen = str(config.get("checkpoint") or ""), config.get("doc_maxlen")
        return cls(directory.resolve(), checkpoint, collection, _content(directory), maxlen, metadata)

    def inner_checkpoint(self) -> Path:
        """Return the checkpoint inside the index; its metadata cannot choose one on the hub or elsewhere."""
        path = _inside(self.directory, self.checkpoint)
        if path is None or not path.is_dir():
            raise RetrievalError(
                f"{self.directory} names the checkpoint {self.checkpoint or 'none'!r}, which is not inside it; run "
                "`leret index build --kind colbert --model CHECKPOINT --corpus PATH --out DIR --set index_root="
                f"{self.directory.parent} --set index_name={self.directory.name}` and search DIR"
            )
        return path

    def token_counts(self) -> list[int]:
        counts: list[int] = []
        try:
            for chunk in range(int(self.metadata["num_chunks"])):
                counts += json.loads((self.directory / f"doclens.{chunk}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise RetrievalError(f"{self.directory}: doclens cannot be read ({error}); download it again") from error
        return counts

    def require_corpus(
        self, corpus: Documents, text: Callable[[Document], str], count: Callable[[list[str]], list[int]]
    ) -> None:
        """Refuse a corpus with another number of documents, or of tokens in a sample of them.

        ``text`` returns a document's indexed text; ``count`` returns numbers of tokens under the index's model.
        """
        counts = self.token_counts()
        if len(counts) != len(corpus):
            raise RetrievalError(
                f"{self.directory} is an index of another corpus: it has {len(counts)} documents, this one has "
                f"{len(corpus)}; name the collection that it was built from, in its order"
            )
        ids = list(corpus)
        sample = range(0, len(ids), max(1, len(ids) // _SAMPLE))
        n_tokens = count([text(corpus[ids[i]]) for i in sample])
        equal = sum(counts[i] == n for i, n in zip(sample, n_tokens, strict=True))
        if equal < _EQUAL * len(n_tokens):
            raise RetrievalError(
                f"{self.directory} is an index of another corpus: of {len(n_tokens)} documents, {equal} have as many "
                "tokens as in the index; name the collection that it was built from, in its order"
            )

    def describe(self) -> dict[str, Any]:
        files = [path for path in self.directory.iterdir() if path.is_file()]
        return {
            "engine": "colbert",
            "documents": len(self.token_counts()),
            "chunks": self.metadata["num_chunks"],
            "vectors": self.metadata.get("num_embeddings"),
            "bits": (self.metadata.get("config") or {}).get("nbits"),
            "tokens a document": self.doc_maxlen,
            "checkpoint": self.checkpoint or None,
            "collection": None if self.collection is None else str(self.collection),
            "digest": self.digest,
            "size": f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files",
        }

    def problems(self) -> list[str]:
        counts, vectors = self.token_counts(), self.metadata.get("num_embeddings")
        names = [f"{chunk}.{part}" for chunk in range(int(self.metadata["num_chunks"])) for part in _PARTS]
        missing = [name for name in (*names, "avg_residual.pt", "buckets.pt") if not (self.directory / name).is_file()]
        problems = [f"{name} is missing" for name in missing]
        if vectors is not None and vectors != sum(counts):
            problems.append(f"metadata.json has {vectors} vectors, the doclens have {sum(counts)}")
        return problems


class Collection:
    """A ``collection.tsv`` with a number, a passage as ``title | text``, and perhaps a title per line."""

    def __init__(self, path: Path) -> None:
        self._lines: list[tuple[str, str]] = []
        content = blake2b(digest_size=16)
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for row, line in enumerate(file):
                number, *rest = line.rstrip("\r\n").split("\t")
                if row == 0 and number == "id":
                    raise RetrievalError(f"{path}:1: a ColBERT collection has no header; remove the line")
                if not rest or number.strip() != str(row):
                    raise RetrievalError(f"{path}:{row + 1}: not a line of {row}, a tab and the passage")
                content.update(line.encode("utf-8", "surrogateescape"))
                title, bar, text = rest[0].partition(" | ")
                if len(rest) > 1:
                    title, text = rest[1], text if bar and title == rest[1] else rest[0]
                elif not bar:
                    title, text = "", rest[0]
                self._lines.append((title, text))
        self.digest = content.hexdigest()

    def __getitem__(self, doc_id: str) -> Document:
        return Document(doc_id, *self._lines[int(doc_id)])

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self._lines)))

    def __len__(self) -> int:
        return len(self._lines)


def _inside(directory: Path, name: Any) -> Path | None:
    """Return the path that a downloaded file names; None if nothing inside the directory has it."""
    try:
        path = (directory / str(name or "..")).resolve()
        return path if path.is_relative_to(directory.resolve()) and path.exists() else None
    except (OSError, ValueError):  # not a file name
        return None


def _content(directory: Path) -> str:
    content = blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in {".json", ".pt"}:
            size = path.stat().st_size
            content.update(f"{path.name}\0{size}\0".encode())
            if size <= _SMALL:
                content.update(path.read_bytes())
    return content.hexdigest()
