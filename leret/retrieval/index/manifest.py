"""An index directory: one format for every engine.

::

    manifest.json     what the directory is; written last
    documents.*       the documents, so that the index opens alone (`leret.retrieval.index.documents`)
    ...               the engine's own files

A directory appears whole or not at all (`leret.core.files`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from leret.core.errors import RetrievalError
from leret.core.files import atomic_directory, is_incomplete, write_atomically
from leret.core.progress import Progress, Silent
from leret.core.runs import installed_version
from leret.core.types import digest as digest_of
from leret.retrieval.base import Documents, Retriever
from leret.retrieval.index.documents import MappedDocuments, write_documents

MANIFEST = "manifest.json"

_FORMAT = 2
_REWRITTEN = frozenset({"chroma"})
"""Folders whose library writes to them whenever it opens them: no size and no digest of theirs would stay true."""


class IndexEngine(Protocol):
    """An engine with its settings: builds indexes and opens them."""

    kind: ClassVar[str]
    resumable: ClassVar[bool] = False  # does `write` go on where a stopped one ended?

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose versions matter to an index."""
        return ()

    def ranking_keys(self) -> dict[str, Any]:
        """All that decides the rankings, beside the corpus, as JSON values."""

    def external_paths(self) -> dict[str, str]:
        """External paths needed to open the index; not part of its digest."""
        return {}

    def digest(self, corpus: str) -> str:
        """Of the retriever over the corpus of that digest."""
        return digest_of(self.kind, self.ranking_keys(), corpus)

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        """Write the engine's files into a directory."""

    def open(self, directory: Path, documents: MappedDocuments) -> Retriever:
        """An index that `write` wrote; RetrievalError where a file is missing, broken, or of other documents."""

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        """The engine that built an index."""


class Manifest(BaseModel):
    """What an index directory says of itself.

    Attributes:
        engine: kind of the retriever: bm25, dense ...
        settings: all that decides its rankings, beside the corpus.
        versions: of the packages that made it.
        corpus: digest of the corpus.
        documents: in the index.
        digest: of the retriever: engine, settings and corpus.
        places: external paths: a model, a downloaded index. Decides nothing.
        files: bytes and BLAKE2b digest of every file.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: int = _FORMAT
    engine: str
    settings: dict[str, Any]
    versions: dict[str, str]
    corpus: str
    documents: int
    digest: str
    places: dict[str, str]
    files: dict[str, tuple[int, str]] = {}

    @classmethod
    def planned(cls, engine: IndexEngine, corpus: Documents) -> Manifest:
        """The manifest, still without files, of the index that an engine would build."""
        return cls(
            engine=engine.kind,
            settings=engine.ranking_keys(),
            versions={package: found for package in engine.packages if (found := installed_version(package))},
            corpus=corpus.digest,
            documents=len(corpus),
            digest=engine.digest(corpus.digest),
            places=engine.external_paths(),
        )

    def equals(self, other: Manifest) -> bool:
        """Would building ``other`` make this index again?"""
        decides = ("engine", "settings", "versions", "corpus", "documents", "digest")
        same_places = self.places.keys() == other.places.keys()
        return same_places and all(getattr(self, name) == getattr(other, name) for name in decides)

    def require_corpus(self, corpus: Documents, directory: Path) -> None:
        if self.corpus != corpus.digest:
            raise RetrievalError(
                f"{directory} is an index of another corpus ({self.documents} documents, digest {self.corpus}; "
                f"this one has {len(corpus)}, digest {corpus.digest}); name another directory"
            )

    def require_settings(self, planned: Manifest, directory: Path) -> None:
        """Refuse an index that was made with other settings; versions of packages may differ."""
        if (self.engine, self.digest) == (planned.engine, planned.digest):
            return
        differing = [
            f"{name}: {self.settings.get(name)!r} there, {planned.settings.get(name)!r} in the recipe"
            for name in sorted({*self.settings, *planned.settings})
            if self.settings.get(name) != planned.settings.get(name)
        ]
        if self.engine != planned.engine:
            differing = [f"kind: {self.engine} there, {planned.engine} in the recipe"]
        raise RetrievalError(
            f"{directory} is an index with other settings ({'; '.join(differing)}); "
            "correct the recipe, or name another directory under retriever.index"
        )


def write_index(engine: IndexEngine, corpus: Documents, directory: Path, progress: Progress | None = None) -> Manifest:
    """Build an index in place of whatever the directory holds."""
    planned = Manifest.planned(engine, corpus)
    key = digest_of(planned.engine, planned.settings, planned.versions, planned.corpus)
    busy = RetrievalError(f"{directory}: another process is building this index; wait for it, then try again")
    try:
        with atomic_directory(directory, key, busy, resumable=engine.resumable) as scratch:
            write_documents(corpus, scratch)
            engine.write(corpus, scratch, progress or Silent())
            write_manifest(planned, scratch)
    except OSError as error:
        raise RetrievalError(
            f"{directory}: the index cannot be written ({error.strerror or error}); "
            "free some space, or name a directory that can be written"
        ) from error
    return read_manifest(directory)


def read_manifest(directory: Path) -> Manifest:
    """What an index directory says of itself; RetrievalError where it is none, unfinished, or of another layout."""
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if is_incomplete(directory):
            raise RetrievalError(f"{directory}: its build was stopped before its end; run the build again") from error
        raise RetrievalError(f"{directory} is no index ({error}); build one, or name another directory") from error
    form = values.get("format") if isinstance(values, dict) else None
    if form != _FORMAT:
        raise RetrievalError(f"{path} is no manifest of format {_FORMAT} (it says {form!r}); build the index again")
    try:
        return Manifest.model_validate_json(json.dumps(values))  # in which a list may be a tuple
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg'].lower()}" for fault in error.errors())
        raise RetrievalError(f"{path}: the manifest is not sound ({faults}); build the index again") from error


def write_manifest(manifest: Manifest, directory: Path) -> Manifest:
    """Finish an index: list its files, then write the manifest."""
    found = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    files = {
        name.as_posix(): (path.stat().st_size, _content(path))
        for name, path in found.items()
        if name.name not in {MANIFEST, ".key"} and not _REWRITTEN.intersection(name.parts)
    }
    values = {**manifest.model_dump(), "files": files}
    write_atomically(directory / MANIFEST, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return read_manifest(directory)


def open_documents(manifest: Manifest, engine: IndexEngine, directory: Path) -> MappedDocuments:
    """The documents of an index, if its manifest is the one that was written with them."""
    documents = MappedDocuments(directory, manifest.corpus)
    problem = None
    if len(documents) != manifest.documents:
        problem = f"it says {manifest.documents} documents, and {len(documents)} are stored"
    elif engine.ranking_keys() != manifest.settings:
        problem = f"its settings are not all that an index of kind {manifest.engine} has, or more"
    elif engine.digest(manifest.corpus) != manifest.digest:
        problem = "its digest is not that of its settings and its corpus"
    if problem is not None:
        raise RetrievalError(f"{directory / MANIFEST} does not fit the index ({problem}); build the index again")
    return documents


def check_files(manifest: Manifest, directory: Path, *, content: bool) -> list[str]:
    """What is wrong with the files of an index, one line each; without ``content`` by their sizes alone."""
    problems = []
    for name, (size, digest) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, and {size} were written")
        elif content and _content(path) != digest:
            problems.append(f"{name} is not what was written: its digest differs")
    return problems


def _content(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
