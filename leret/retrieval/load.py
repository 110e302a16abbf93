"""Retrievers from settings: the table of kinds, and how they are built, opened and composed."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from leret.config.base import RecipePath, mark_of, portable
from leret.config.retriever import (
    BM25Settings,
    ClinicalTrialsSettings,
    ColbertSettings,
    DenseSettings,
    HybridSettings,
    NoRetrieverSettings,
    PubMedSettings,
    RemoteSettings,
    RetrieverSettings,
    RM3Settings,
    TantivySettings,
)
from leret.core.errors import ConfigError, RetrievalError
from leret.core.progress import Progress
from leret.core.stages import completed, input_stamps, mark_completed, stage_key
from leret.retrieval.base import Documents, Retriever
from leret.retrieval.index.documents import MappedDocuments
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
        settings: class of its section in a recipe.
        target: ``module:Class`` below leret.retrieval, imported at the first use.
        role: how the class is used:

            - ``index``: an `IndexEngine`, made from settings.
            - ``composite``: a retriever over several indexes, with a manifest (`leret.retrieval.fusion.Hybrid`).
            - ``view``: a retriever over the index of another kind, made from the parts that ``Class.parts(settings)``
              names, and settings.
            - ``server``: a retriever made from settings.
            - ``corpus server``: a retriever made from settings and corpus, with a ``check`` that the server answers.
    """

    settings: type[RetrieverSettings]
    target: str
    role: Literal["index", "composite", "view", "server", "corpus server"]

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(f"leret.retrieval.{module}"), name)


ENGINES = {
    "bm25": EngineKind(BM25Settings, "engines.bm25:BM25Index", "index"),
    "tantivy": EngineKind(TantivySettings, "engines.tantivy:TantivyIndex", "index"),
    "dense": EngineKind(DenseSettings, "engines.dense:DenseIndex", "index"),
    "colbert": EngineKind(ColbertSettings, "engines.colbert:ColbertIndex", "index"),
    "hybrid": EngineKind(HybridSettings, "fusion:Hybrid", "composite"),
    "rm3": EngineKind(RM3Settings, "engines.rm3:RM3", "view"),
    "remote": EngineKind(RemoteSettings, "clients.leret:Remote", "corpus server"),
    "pubmed": EngineKind(PubMedSettings, "clients.pubmed:PubMed", "server"),
    "clinicaltrials": EngineKind(ClinicalTrialsSettings, "clients.clinicaltrials:ClinicalTrials", "server"),
    "none": EngineKind(NoRetrieverSettings, "base:NoRetriever", "server"),
}
"""Kinds of retrievers, by `retriever.kind`."""

RetrieverSettings.table = ENGINES


def load_retriever(
    settings: RetrieverSettings, corpus: Documents | None, cache: Path, progress: Progress | None = None
) -> Retriever:
    """Return the retriever of a recipe; build its index if it is missing.

    An index in the cache is rebuilt if it does not fit. An index in a directory that the settings name may be shared
    and costly: if it does not fit, it is refused. A remote server must answer at once. ``corpus`` is None for servers;
    ``cache`` is the directory for the index if the settings name none.

    Raises:
        ConfigError: a URL is invalid, or an environment variable is not set.
        RetrievalError: the index cannot be built or opened, or does not fit; or a server does not answer.
    """
    engine = ENGINES[settings.kind]
    if engine.role == "server":
        return _with_source(settings, engine.load()(settings))
    if engine.role == "corpus server":
        remote = engine.load()(settings, corpus)
        remote.check()
        return _with_source(None if settings.needs_corpus else settings, remote)
    if corpus is None:
        raise RetrievalError(f"retriever.kind {settings.kind} searches a corpus; name it with data.corpus")
    return _open_or_build(settings, corpus, cache / str(settings.index_kind), progress, shared=False)


def _open_or_build(
    settings: RetrieverSettings, corpus: Documents, directory: Path, progress: Progress | None, *, shared: bool
) -> Retriever:
    if named := getattr(settings, "index", None):
        directory, shared = Path(named), True
    kind = ENGINES[settings.kind]
    if kind.role != "index":
        engine = kind.load()
        parts = [
            _open_or_build(part, corpus, directory / folder, progress, shared=shared)
            for folder, part in engine.parts(settings).items()
        ]
        if kind.role == "view":
            return _with_source(None, engine(*parts, settings))
        if not (shared and (directory / MANIFEST).exists()):
            write_manifest(plan_index(settings, corpus), directory)
        return _with_source(directory, engine(*parts, settings))
    index = _index_engine(settings)
    planned = Manifest.planned(index, corpus)
    if shared and directory.exists():
        manifest = read_manifest(directory)
        manifest.require_corpus(corpus, directory)
        manifest.require_settings(planned, directory)
    else:
        with suppress(RetrievalError):  # missing, broken, or of another layout: it can be built again
            if read_manifest(directory).equals(planned):
                return _open(index, directory)
        write_index(index, corpus, directory, progress)
    return _open(index, directory)


def _index_engine(settings: RetrieverSettings) -> IndexEngine:
    engine = ENGINES[settings.kind].load()
    return cast(IndexEngine, getattr(engine, "of", engine)(settings))


def plan_index(settings: RetrieverSettings, corpus: Documents) -> Manifest:
    """Return the manifest, without files, of the index that settings describe; its models must exist."""
    kind = ENGINES[settings.kind]
    if kind.role == "index":
        return Manifest.planned(_index_engine(settings), corpus)
    if kind.role != "composite":
        raise RetrievalError(f"retriever.kind: {settings.kind} has no index to build")
    parts: Mapping[str, RetrieverSettings] = kind.load().parts(settings)
    places = {}
    for folder, part in parts.items():
        named = getattr(part, "index", None)
        places[folder] = os.path.abspath(named) if named else folder
    planned: Manifest = kind.load().manifest([plan_index(part, corpus) for part in parts.values()], settings, places)
    return planned


def build_index(
    settings: RetrieverSettings, corpus: Documents, directory: Path, progress: Progress | None = None
) -> Manifest:
    """Build an index in place of the directory's content; of a composite, build the parts that do not fit."""
    if ENGINES[settings.kind].role == "index":
        return write_index(_index_engine(settings), corpus, directory, progress)
    planned = plan_index(settings, corpus)
    for folder, part in ENGINES[settings.kind].load().parts(settings).items():
        _open_or_build(part, corpus, directory / planned.places[folder], progress, shared=False)
    return write_manifest(planned, directory)


def model_keys() -> dict[str, str]:
    """Return the key that names the model, for each kind that has one; the first of several."""
    return {
        kind: name
        for kind, engine in ENGINES.items()
        for name, field in reversed(engine.settings.model_fields.items())
        if (mark := mark_of(field, RecipePath)) and mark.hub
    }


def check_index(directory: Path, corpus: Documents | None = None) -> Manifest:
    """Read an index through, open it and search it; RetrievalError if it is broken or not of ``corpus``."""
    manifest = read_manifest(directory)
    if _role(manifest) == "composite":
        open_index(directory)
        for place in manifest.places.values():
            check_index(directory / place, corpus)
        return manifest
    if problems := check_files(manifest, directory, content=True):
        raise RetrievalError(f"{directory}: {'; '.join(problems)}; build the index again")
    if corpus is not None:
        manifest.require_corpus(corpus, directory)
    documents = MappedDocuments(directory, manifest.corpus)
    sample = documents.passages(range(min(1, len(documents))), (0.0,))
    open_index(directory).search([*(f"{passage.title} {passage.text}" for passage in sample), ""], 1)
    return manifest


def open_index(path: str | Path) -> Retriever:
    """Open an index directory with the documents in it.

    Raises:
        RetrievalError: it is not an index, unfinished, broken, or needs a missing model.
        MissingDependency: the engine's package is not installed.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    role = _role(manifest)
    try:
        if role == "index":
            return _open(ENGINES[manifest.engine].load().from_manifest(manifest, directory), directory)
        if role == "composite":
            return _open_composite(manifest, directory)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RetrievalError(
            f"{directory / MANIFEST}: these are not the settings of an index of kind {manifest.engine} "
            f"({type(error).__name__}: {error}); build the index again"
        ) from error
    raise RetrievalError(f"{directory} is an index of kind {manifest.engine!r}, which this leret does not support")


def _role(manifest: Manifest) -> str | None:
    kind = ENGINES.get(manifest.engine)
    return None if kind is None else kind.role


def _open(engine: IndexEngine, directory: Path) -> Retriever:
    manifest = read_manifest(directory)
    key = stage_key("", input_stamps(directory / MANIFEST, *(directory / name for name in manifest.files)))
    checked = completed(directory, "checked", key) is not None  # files with these times were read through before
    problems = check_files(manifest, directory, content=not checked)
    if problems:
        raise RetrievalError(f"{directory}: the index is broken ({'; '.join(problems[:3])}); build it again")
    if not checked:
        with suppress(OSError):
            mark_completed(directory, "checked", key, {})
    return _with_source(directory, engine.open(directory, open_documents(manifest, engine, directory)))


def _open_composite(manifest: Manifest, directory: Path) -> Retriever:
    engine = ENGINES[manifest.engine].load()
    settings = engine.settings_of(manifest)
    folders = [directory / place for place in manifest.places.values()]
    if not manifest.equals(engine.manifest(list(map(read_manifest, folders)), settings, manifest.places)):
        raise RetrievalError(f"{directory / MANIFEST} does not fit its indexes; build the index again")
    return _with_source(directory, engine(*map(open_index, folders), settings))


def _with_source(source: Path | RetrieverSettings | None, retriever: Any) -> Retriever:
    """Note on a retriever what opens it again."""
    retriever.source = source
    return cast(Retriever, retriever)


def retriever_record(retriever: Any, directory: Path) -> dict[str, Any] | None:
    """Return what `reopen` needs, in JSON values; None if `load_retriever` or `open_index` did not make the retriever.

    An index in memory is written into ``directory``; others stay where they are.
    """
    source = getattr(getattr(retriever, "retriever", retriever), "source", None)  # behind a cache
    if isinstance(source, RetrieverSettings):
        return {"settings": portable(source, directory)}
    if isinstance(source, tuple):
        engine, corpus = source
        source = directory / "indexes" / f"{engine.kind}-{retriever.digest[:8]}"
        if not source.exists():
            write_index(engine, corpus, source, None)
    return None if source is None else {"index": os.path.relpath(source, directory)}


def reopen(record: Mapping[str, Any], directory: Path) -> Retriever:
    """Open the retriever of a record in ``directory``."""
    if "index" in record:
        return open_index((directory / record["index"]).resolve())
    return load_retriever(RetrieverSettings.model_validate(record["settings"]), None, directory / "cache")


@dataclass(frozen=True)
class OpenRetriever:
    """A retriever that a command named, with its description."""

    retriever: Retriever
    engine: str
    corpus: str | None  # digest
    documents: int | None  # number of documents, if known
    directory: Path | None = None  # with the documents, if they can be listed

    def ids(self) -> Container[str] | None:
        """Return the ids of its documents; None if they cannot be listed."""
        if self.directory is None or self.corpus is None:
            return None
        return frozenset(MappedDocuments(self.directory, self.corpus))


def open_retriever(index: str, *, token_env: str | None = None) -> OpenRetriever:
    """Open an index directory, or connect to a ``leret`` server.

    Raises:
        ConfigError: the URL is invalid or holds a password, or the variable is not set.
        RetrievalError: there is no index, it is broken, or the server does not answer.
    """
    if index.startswith(("http://", "https://")):
        if "@" in index:
            raise ConfigError("the URL may hold no user or password; put the token in a variable (--token-env)")
        settings = RemoteSettings(urls=(index,), token_env=token_env, retry_for_s=30.0)
        remote = ENGINES["remote"].load()(settings)
        served = remote.served()
        return OpenRetriever(remote, served.engine, served.corpus, served.documents)
    directory = Path(index)
    retriever = open_index(directory)
    manifest = read_manifest(directory)
    documents = directory
    if _role(manifest) == "composite":  # its parts have the same documents
        documents /= next(iter(manifest.places.values()))
    return OpenRetriever(retriever, manifest.engine, manifest.corpus, manifest.documents, documents)
