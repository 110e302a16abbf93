"""Table of retriever kinds, and functions that build, open and compose retrievers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, cast

from leret.config import retriever as kinds
from leret.config.base import portable
from leret.config.retriever import RemoteSettings, RetrieverSettings
from leret.core.classes import is_in_file, with_identity
from leret.core.errors import ConfigError, RetrievalError
from leret.core.progress import Progress
from leret.core.stages import completed, input_stamps, mark_completed, stage_key
from leret.retrieval.base import Documents, Retriever
from leret.retrieval.index.documents import DocumentTable
from leret.retrieval.index.manifest import (
    MANIFEST,
    IndexEngine,
    Manifest,
    check_files,
    open_documents,
    read_manifest,
    write_index,
    write_manifest,
)


@dataclass(frozen=True)
class EngineKind:
    """One kind of retriever.

    Attributes:
        settings: class of the recipe section.
        target: the class, or ``module:Class`` relative to leret.retrieval, imported on first use.
        role: what the class is, and what its constructor takes:

            - ``index``: an `IndexEngine`; takes settings.
            - ``composite``: a retriever over several indexes, with a manifest; see
                `leret.retrieval.fusion.Hybrid`.
            - ``view``: a retriever over another kind's index; takes the retrievers that
              ``Class.parts(settings)`` describes, and settings.
            - ``server``: a retriever; takes settings.
            - ``corpus``: a retriever; takes settings, and a corpus unless the settings need none.
                Its ``check`` method contacts its server, if any.
    """

    settings: type[RetrieverSettings]
    target: str | type[Any]
    role: Literal["index", "composite", "view", "server", "corpus"]

    def load(self) -> Any:
        if not isinstance(self.target, str):
            return self.target
        return resolve_name(f"leret.retrieval.{self.target}")


ENGINES = {
    "bm25": EngineKind(kinds.BM25Settings, "engines.bm25:BM25Index", "index"),
    "dense": EngineKind(kinds.DenseSettings, "engines.dense:DenseIndex", "index"),
    "hybrid": EngineKind(kinds.HybridSettings, "fusion:Hybrid", "composite"),
    "rm3": EngineKind(kinds.RM3Settings, "engines.rm3:RM3", "view"),
    "remote": EngineKind(kinds.RemoteSettings, "clients.remote:Remote", "corpus"),
    "none": EngineKind(kinds.NoRetrieverSettings, "base:NoRetriever", "server"),
}
"""Retriever kinds, by `retriever.kind`."""

RetrieverSettings.table = ENGINES


def load_retriever(
    settings: RetrieverSettings,
    corpus: Documents | None,
    cache: Path,
    progress: Progress | None = None,
) -> Retriever:
    """Return the retriever of a recipe. Build its index if the index is missing.

    An index in ``cache`` is rebuilt if it was built from another corpus or other settings. For an
    index named in the settings, which may be shared and costly, this is an error instead. A remote
    server must be reachable. ``corpus`` may be None for servers. ``cache`` is the parent directory
    of indexes that the settings do not name.

    Raises:
        ConfigError: a URL is invalid, or an environment variable is not set.
        RetrievalError: the index cannot be built or opened, its corpus or settings differ, or a
            server does not answer.
    """
    engine = _kind(settings.kind)
    if engine.role == "server":
        server = with_identity(engine.load()(settings), settings.kind)
        return _with_source(settings, server)
    if engine.role == "corpus":
        remote = engine.load()(settings, corpus)
        remote.check()
        with_identity(remote, settings.kind)
        return _with_source(None if settings.needs_corpus else settings, remote)
    if corpus is None:
        raise RetrievalError(f"retriever.kind {settings.kind} needs a corpus; set data.corpus")
    return _open_or_build(
        settings, corpus, cache / str(settings.index_kind), progress, shared=False
    )


def _open_or_build(
    settings: RetrieverSettings,
    corpus: Documents,
    directory: Path,
    progress: Progress | None,
    *,
    shared: bool,
) -> Retriever:
    named = getattr(settings, "index", None)
    if named:
        directory = Path(named)
        shared = True
    kind = _kind(settings.kind)
    if kind.role != "index":
        engine = kind.load()
        parts = []
        for folder, part in engine.parts(settings).items():
            retriever = _open_or_build(part, corpus, directory / folder, progress, shared=shared)
            parts.append(retriever)
        if kind.role == "view":
            return _with_source(None, engine(*parts, settings))
        if not (shared and (directory / MANIFEST).exists()):
            write_manifest(plan_index(settings, corpus), directory)
        return _with_source(directory, engine(*parts, settings))
    index = index_engine(settings)
    planned = Manifest.planned(index, corpus)
    if shared and directory.exists():
        manifest = read_manifest(directory)
        manifest.require_corpus(corpus, directory)
        manifest.require_settings(planned, directory)
    else:
        with suppress(RetrievalError):  # missing, broken, or in another format: build it again
            if read_manifest(directory).equals(planned):
                return _open(index, directory)
        write_index(index, corpus, directory, progress)
    return _open(index, directory)


def index_engine(settings: RetrieverSettings) -> IndexEngine:
    """Return the engine that builds and opens an index with these settings."""
    engine = _kind(settings.kind).load()
    return cast(IndexEngine, getattr(engine, "of", engine)(settings))


def plan_index(settings: RetrieverSettings, corpus: Documents) -> Manifest:
    """Return the manifest, with ``files`` empty, of an index with these settings.

    The models in them must exist.
    """
    kind = _kind(settings.kind)
    if kind.role == "index":
        return Manifest.planned(index_engine(settings), corpus)
    if kind.role != "composite":
        raise RetrievalError(
            f"retriever.kind {settings.kind} has no index to build; choose a kind with an index"
        )
    engine = kind.load()
    parts: Mapping[str, RetrieverSettings] = engine.parts(settings)
    paths = {}
    manifests = []
    for folder, part in parts.items():
        named = getattr(part, "index", None)
        paths[folder] = os.path.abspath(named) if named else folder
        manifests.append(plan_index(part, corpus))
    return cast(Manifest, engine.manifest(manifests, settings, paths))


def build_index(
    settings: RetrieverSettings,
    corpus: Documents,
    directory: Path,
    progress: Progress | None = None,
) -> Manifest:
    """Build an index, replacing the directory's content.

    For a composite, build only missing or outdated parts.
    """
    if _kind(settings.kind).role == "index":
        return write_index(index_engine(settings), corpus, directory, progress)
    planned = plan_index(settings, corpus)
    for folder, part in _kind(settings.kind).load().parts(settings).items():
        _open_or_build(part, corpus, directory / planned.places[folder], progress, shared=False)
    return write_manifest(planned, directory)


def check_index(directory: Path, corpus: Documents | None = None) -> Manifest:
    """Read all files of an index, open it and search it.

    Raise RetrievalError if it is broken or not of ``corpus``.
    """
    manifest = read_manifest(directory)
    if _role(manifest) == "composite":
        open_index(directory)
        for place in manifest.places.values():
            check_index(directory / place, corpus)
        return manifest
    problems = check_files(manifest, directory, content=True)
    if problems:
        raise RetrievalError(f"{directory}: {'; '.join(problems)}; build the index again")
    if corpus is not None:
        manifest.require_corpus(corpus, directory)
    documents = DocumentTable.open(directory, manifest.corpus)
    sample = documents.passages(range(min(1, len(documents))), (0.0,))
    queries = [f"{passage.title} {passage.text}" for passage in sample]
    open_index(directory).search([*queries, ""], 1)
    return manifest


def open_index(path: str | Path) -> Retriever:
    """Open an index directory. It contains the documents, so no corpus is needed.

    Raises:
        RetrievalError: the directory is not an index, or the index is unfinished, broken, or needs
            a missing model.
        MissingDependency: the engine's package is not installed.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    if is_in_file(manifest.engine):
        raise RetrievalError(
            f"{directory} was built with the code {manifest.engine}, which runs only if a recipe "
            "names it; install it as a package, and build the index with package.module:NAME"
        )
    role = _role(manifest)
    try:
        if role == "index":
            engine = _kind(manifest.engine).load()
            return _open(engine.from_manifest(manifest, directory), directory)
        if role == "composite":
            engine = _kind(manifest.engine).load()
            folders = [directory / path for path in manifest.places.values()]
            settings = engine.settings_of(manifest)
            parts = [read_manifest(folder) for folder in folders]
            planned = engine.manifest(parts, settings, manifest.places)
            if manifest.equals(planned):
                return _with_source(directory, engine(*map(open_index, folders), settings))
            raise RetrievalError(
                f"{directory / MANIFEST} does not match the indexes of its parts; "
                "build the index again"
            )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RetrievalError(
            f"{directory / MANIFEST} has invalid settings for an index of kind {manifest.engine} "
            f"({type(error).__name__}: {error}); build the index again"
        ) from error
    raise RetrievalError(
        f"{directory} is an index of unknown kind {manifest.engine!r}; "
        "update leret or build it again"
    )


def _role(manifest: Manifest) -> str | None:
    kind: EngineKind | None = RetrieverSettings.find(manifest.engine)
    return None if kind is None else kind.role


def _kind(name: str) -> EngineKind:
    kind: EngineKind = RetrieverSettings.find(name)
    return kind


def _open(engine: IndexEngine, directory: Path) -> Retriever:
    manifest = read_manifest(directory)
    key = stage_key(
        "", input_stamps(directory / MANIFEST, *(directory / name for name in manifest.files))
    )
    # files are unchanged since an earlier check
    checked = completed(directory, "checked", key) is not None
    problems = check_files(manifest, directory, content=not checked)
    if problems:
        raise RetrievalError(
            f"{directory}: the index is broken ({'; '.join(problems[:3])}); build it again"
        )
    if not checked:
        with suppress(OSError):
            mark_completed(directory, "checked", key, {})
    return _with_source(
        directory, engine.open(directory, open_documents(manifest, engine, directory))
    )


def _with_source(source: Path | RetrieverSettings | None, retriever: Any) -> Retriever:
    retriever.source = source  # for `retriever_record`
    return cast(Retriever, retriever)


def retriever_record(retriever: Any, directory: Path) -> dict[str, Any] | None:
    """Return the JSON values that `reopen` needs, or None if the retriever cannot be reopened.

    An index in memory is written to ``directory``. Indexes on disk are not copied.
    """
    # look inside a CachedRetriever
    source = getattr(getattr(retriever, "retriever", retriever), "source", None)
    if isinstance(source, RetrieverSettings):
        return {"settings": portable(source, directory)}
    if isinstance(source, tuple):
        engine, corpus = source
        _, _, name = engine.kind.rpartition(":")
        source = directory / "indexes" / f"{name}-{retriever.digest[:8]}"
        if not source.exists():
            write_index(engine, corpus, source, None)
    return None if source is None else {"index": os.path.relpath(source, directory)}


def reopen(record: Mapping[str, Any], directory: Path) -> Retriever:
    """Open the retriever of a `retriever_record`.

    Paths in ``record`` are relative to ``directory``.
    """
    if "index" in record:
        return open_index((directory / record["index"]).resolve())
    return load_retriever(
        RetrieverSettings.model_validate(record["settings"]), None, directory / "cache"
    )


@dataclass(frozen=True)
class OpenRetriever:
    """Result of `open_retriever`: a retriever and its description."""

    retriever: Retriever
    engine: str
    corpus: str | None  # digest of the corpus, if known
    documents: int | None  # number of documents, if known
    directory: Path | None = None  # index directory with the documents; None for a server

    def table(self) -> DocumentTable | None:
        """Open the index's documents, or return None for a server, which cannot list them."""
        if self.directory is None or self.corpus is None:
            return None
        return DocumentTable.open(self.directory, self.corpus)


def open_retriever(index: str, *, token_env: str | None = None) -> OpenRetriever:
    """Open an index directory, or connect to a ``leret`` server.

    Raises:
        ConfigError: the URL is invalid or contains a password, or the variable ``token_env`` is not
            set.
        RetrievalError: the index is missing or broken, or the server does not answer.
    """
    if index.startswith(("http://", "https://")):
        if "@" in index:
            raise ConfigError(
                "the URL must not contain a user or password; use a token instead (--token-env)"
            )
        settings = RemoteSettings(urls=(index,), token_env=token_env, retry_for_s=30.0)
        remote = ENGINES["remote"].load()(settings)
        served = remote.info()
        return OpenRetriever(remote, served.engine, served.corpus, served.documents)
    directory = Path(index)
    retriever = open_index(directory)
    manifest = read_manifest(directory)
    documents = directory
    if _role(manifest) == "composite":  # all parts have the same documents
        documents /= next(iter(manifest.places.values()))
    return OpenRetriever(retriever, manifest.engine, manifest.corpus, manifest.documents, documents)
