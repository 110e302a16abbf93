"""Index directories: the documents, the engine's files, and manifest.json (written last)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from leret.config.retriever import RetrieverSettings
from leret.core.classes import identity
from leret.core.errors import RetrievalError
from leret.core.files import atomic_directory, file_digest, is_incomplete, write_atomically
from leret.core.progress import Progress
from leret.core.runs import installed_version
from leret.core.types import digest as digest_of
from leret.retrieval.base import Documents, Retriever
from leret.retrieval.index.documents import DocumentTable, write_documents

MANIFEST = "manifest.json"

_FORMAT = 3
_REWRITTEN = frozenset({"chroma"})
"""Folders that Chroma changes when it opens them, so the manifest does not list their files."""


class IndexEngine(Protocol):
    """Search engine with its settings. Builds and opens indexes."""

    settings: Any
    resumable: ClassVar[bool] = False  # True: `write` continues an interrupted build

    @property
    def kind(self) -> str:
        """The retriever kind, by short name or path."""
        return str(self.settings.kind)

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages used to write the index. The manifest records the version of each package."""
        return ()

    def ranking_keys(self) -> dict[str, Any]:
        """Return all inputs that determine the rankings, except the corpus, as JSON values."""
        keys: dict[str, Any] = self.settings.ranking_keys()
        return keys

    def external_paths(self) -> dict[str, str]:
        """Return the paths outside the index that are needed to open it.

        They do not change the digest.
        """
        return {}

    def digest(self, corpus: str) -> str:
        """Return the digest of the retriever; ``corpus`` is the digest of the corpus."""
        return digest_of(identity(self.kind), self.ranking_keys(), corpus)

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        """Write the engine's files to a directory."""

    def open(self, directory: Path, documents: DocumentTable) -> Retriever:
        """Open an index.

        Raise RetrievalError if a file is missing, broken, or does not match the documents.
        """

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        """Return an engine with the settings in the manifest."""
        engine: Any = cls
        values = {"kind": manifest.engine, **manifest.settings}
        return cast(Self, engine(RetrieverSettings.model_validate(values)))


class Manifest(BaseModel):
    """Content of manifest.json, which describes an index."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: int = _FORMAT
    engine: str  # retriever kind: bm25, dense ...
    settings: dict[str, Any]  # see `IndexEngine.ranking_keys`
    versions: dict[str, str]  # versions of the packages that wrote the index
    corpus: str  # digest of the corpus
    documents: int  # number of documents or chunks
    parents: int = 0  # number of the chunks' documents; 0 if no document is a chunk
    digest: str  # digest of the retriever: engine, settings and corpus
    # paths of models or of a composite's parts; rankings do not depend on paths
    places: dict[str, str]
    files: dict[str, tuple[int, str]] = {}  # size in bytes and BLAKE2b digest per file

    @classmethod
    def planned(cls, engine: IndexEngine, corpus: Documents) -> Manifest:
        """Return the manifest of the index that ``engine`` would build, with ``files`` empty."""
        versions = {}
        for package in engine.packages:
            version = installed_version(package)
            if version:
                versions[package] = version
        n_parents = 0
        if corpus.parents:
            n_parents = len({corpus.parents.get(doc_id, doc_id) for doc_id in corpus})
        return cls(
            engine=engine.kind,
            settings=engine.ranking_keys(),
            versions=versions,
            corpus=corpus.digest,
            documents=len(corpus),
            parents=n_parents,
            digest=engine.digest(corpus.digest),
            places=engine.external_paths(),
        )

    @property
    def size(self) -> str:
        """The number of documents, or of chunks and their documents, as text."""
        if self.parents:
            return f"{self.documents:,} chunks of {self.parents:,} documents"
        return f"{self.documents:,} documents"

    def equals(self, planned: Manifest) -> bool:
        """Return whether a build with the manifest ``planned`` would reproduce this index."""
        if self.places.keys() != planned.places.keys():
            return False
        decides = ("engine", "settings", "versions", "corpus", "documents", "digest")
        return all(getattr(self, name) == getattr(planned, name) for name in decides)

    def require_corpus(self, corpus: Documents, directory: Path) -> None:
        if self.corpus != corpus.digest:
            raise RetrievalError(
                f"{directory} is an index of a different corpus "
                f"({self.documents} documents, digest {self.corpus}; "
                f"yours has {len(corpus)} documents, digest {corpus.digest}); "
                "set retriever.index to another directory"
            )

    def require_settings(self, planned: Manifest, directory: Path) -> None:
        """Raise RetrievalError if the index was built with different settings.

        Package versions may differ.
        """
        if (self.engine, self.digest) == (planned.engine, planned.digest):
            return
        differing = []
        for name in sorted({*self.settings, *planned.settings}):
            value = self.settings.get(name)
            wanted = planned.settings.get(name)
            if value != wanted:
                differing.append(f"{name}: {value!r} in the index, {wanted!r} in the recipe")
        if not differing:
            differing = [f"the code of {planned.engine} has changed"]
        if self.engine != planned.engine:
            differing = [f"kind: {self.engine} in the index, {planned.engine} in the recipe"]
        raise RetrievalError(
            f"{directory} was built with different settings ({'; '.join(differing)}); "
            "change the recipe, or set retriever.index to another directory"
        )


def write_index(
    engine: IndexEngine, corpus: Documents, directory: Path, progress: Progress | None = None
) -> Manifest:
    """Build an index, replacing the directory's content."""
    planned = Manifest.planned(engine, corpus)
    key = digest_of(planned.engine, planned.settings, planned.versions, planned.corpus)
    busy = RetrievalError(
        f"{directory}: another process is building this index; wait for it, then try again"
    )
    try:
        with atomic_directory(directory, key, busy, resumable=engine.resumable) as scratch:
            write_documents(corpus, scratch)
            engine.write(corpus, scratch, progress or Progress())
            write_manifest(planned, scratch)
    except OSError as error:
        raise RetrievalError(
            f"{directory}: cannot write the index ({error.strerror or error}); "
            "free some space, or choose a writable directory"
        ) from error
    return read_manifest(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest.

    Raise RetrievalError if the directory is not a complete index in the current format.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if is_incomplete(directory):
            raise RetrievalError(
                f"{directory}: the index is incomplete; run the build again"
            ) from error
        fault = str(error)
        if isinstance(error, FileNotFoundError):
            fault = f"it has no {MANIFEST}" if directory.is_dir() else "there is no such directory"
        advice = "build one with `leret index build`, or choose another path"
        raise RetrievalError(f"{directory} is not an index ({fault}); {advice}") from error
    form = values.get("format") if isinstance(values, dict) else None
    if form != _FORMAT:
        raise RetrievalError(
            f"{path} has index format {form!r} instead of {_FORMAT}; build the index again"
        )
    try:
        # JSON mode accepts lists for tuples
        return Manifest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg'].lower()}" for fault in error.errors())
        raise RetrievalError(f"{path} is invalid ({faults}); build the index again") from error


def write_manifest(manifest: Manifest, directory: Path) -> Manifest:
    """Write the manifest with a list of the directory's files. This step completes the index."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        is_omitted = path.name in {MANIFEST, ".key"} or _REWRITTEN.intersection(name.parts)
        if path.is_file() and not is_omitted:
            files[name.as_posix()] = (path.stat().st_size, file_digest(path).hex())
    values = {**manifest.model_dump(), "files": files}
    write_atomically(directory / MANIFEST, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return read_manifest(directory)


def open_documents(manifest: Manifest, engine: IndexEngine, directory: Path) -> DocumentTable:
    """Open the documents of an index.

    Raise RetrievalError if the manifest does not match the documents or engine.
    """
    documents = DocumentTable.open(directory, manifest.corpus)
    problem = None
    if len(documents) != manifest.documents:
        problem = f"it lists {manifest.documents} documents, but the index has {len(documents)}"
    elif engine.ranking_keys() != manifest.settings:
        problem = f"its settings are incomplete or invalid for kind {manifest.engine}"
    elif engine.digest(manifest.corpus) != manifest.digest:
        problem = "its digest does not match its settings and corpus"
    if problem is not None:
        raise RetrievalError(
            f"{directory / MANIFEST} does not match the index ({problem}); build the index again"
        )
    return documents


def check_files(manifest: Manifest, directory: Path, *, content: bool) -> list[str]:
    """Return one line per problem with the index files.

    Compare only sizes unless ``content`` is set.
    """
    problems = []
    for name, (size, digest) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif content and file_digest(path).hex() != digest:
            problems.append(f"{name} has changed since the build")
    return problems
