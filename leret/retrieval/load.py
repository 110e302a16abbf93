"""From settings to retrievers: the table of engines, and building, opening and composing by it."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
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
    FusionSettings,
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
from leret.retrieval.engines.colbert_index import PlaidIndex
from leret.retrieval.fusion import Hybrid, hybrid_digest
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
        target: ``module:Class`` below leret.retrieval, imported when it is first used.
        role: what the class is. ``index``: an `IndexEngine`, made from settings. ``parts``: a retriever made from the
            retrievers that ``Class.parts(settings)`` names, and settings. ``server``: a retriever made from settings.
            ``corpus server``: one made from settings and corpus, with a ``check`` that it answers.
    """

    settings: type[RetrieverSettings]
    target: str
    role: Literal["index", "parts", "server", "corpus server"]

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(f"leret.retrieval.{module}"), name)


ENGINES = {
    "bm25": EngineKind(BM25Settings, "engines.bm25:BM25Index", "index"),
    "tantivy": EngineKind(TantivySettings, "engines.tantivy:TantivyIndex", "index"),
    "dense": EngineKind(DenseSettings, "engines.dense:DenseIndex", "index"),
    "colbert": EngineKind(ColbertSettings, "engines.colbert:ColbertIndex", "index"),
    "hybrid": EngineKind(HybridSettings, "fusion:Hybrid", "parts"),
    "rm3": EngineKind(RM3Settings, "engines.rm3:RM3", "parts"),
    "remote": EngineKind(RemoteSettings, "clients.leret:Remote", "corpus server"),
    "pubmed": EngineKind(PubMedSettings, "clients.pubmed:PubMed", "server"),
    "clinicaltrials": EngineKind(ClinicalTrialsSettings, "clients.clinicaltrials:ClinicalTrials", "server"),
    "none": EngineKind(NoRetrieverSettings, "base:NoRetriever", "server"),
}
"""Every kind of `retriever.kind`."""

RetrieverSettings.table = ENGINES


def load_retriever(
    settings: RetrieverSettings, corpus: Documents | None, cache: Path, progress: Progress | None = None
) -> Retriever:
    """The retriever of a recipe; its index is built where it is missing.

    An index in the cache is built again where it does not fit. One in a directory that the settings name may be shared
    and costly: there, what does not fit is refused. A remote server is asked at once whether it is there.

    Args:
        settings: of the recipe.
        corpus: what is searched; None where a server has its own.
        cache: where the index is kept when the settings name no directory.
        progress: of a build.

    Raises:
        ConfigError: a URL is none, or an environment variable is not set.
        RetrievalError: the index cannot be built or opened, or does not fit; or a server does not answer.
    """
    engine = ENGINES[settings.kind]
    if engine.role == "server":
        return _from(settings, engine.load()(settings))
    if engine.role == "corpus server":
        remote = engine.load()(settings, corpus)
        remote.check()
        return _from(None if settings.needs_corpus else settings, remote)
    if corpus is None:
        raise RetrievalError(f"retriever.kind {settings.kind} searches a corpus; name it with data.corpus")
    return _open_or_build(settings, corpus, cache / str(settings.index_kind), progress, shared=False)


def _open_or_build(
    settings: RetrieverSettings, corpus: Documents, directory: Path, progress: Progress | None, *, shared: bool
) -> Retriever:
    named = getattr(settings, "index", None)
    if named:
        directory, shared = Path(named), True
    engine = ENGINES[settings.kind].load()
    if ENGINES[settings.kind].role == "parts":
        parts = engine.parts(settings).items()
        made = [_open_or_build(part, corpus, directory / name, progress, shared=shared) for name, part in parts]
        if isinstance(settings, HybridSettings) and not (shared and (directory / MANIFEST).exists()):
            write_manifest(plan_index(settings, corpus), directory)
        return _from(directory if isinstance(settings, HybridSettings) else None, engine(*made, settings))
    index = _index_engine(settings)
    planned = Manifest.planned(index, corpus)
    if shared and directory.exists():
        manifest = read_manifest(directory)
        manifest.require_corpus(corpus, directory)
        manifest.require_settings(planned, directory)
    else:
        with suppress(RetrievalError):  # missing, broken, of another layout: it can be built again
            if read_manifest(directory).equals(planned):
                return _open(index, directory)
        write_index(index, corpus, directory, progress)
    return _open(index, directory)


def _index_engine(settings: RetrieverSettings) -> IndexEngine:
    engine = ENGINES[settings.kind].load()
    return cast(IndexEngine, getattr(engine, "of", engine)(settings))


def plan_index(settings: RetrieverSettings, corpus: Documents) -> Manifest:
    """The manifest, without files, of the index that settings ask for; of a hybrid, the one of its two indexes.

    Raises:
        RetrievalError: a model that they name is not there, or a server has the index.
    """
    if ENGINES[settings.kind].role == "index":
        return Manifest.planned(_index_engine(settings), corpus)
    if not isinstance(settings, HybridSettings):
        raise RetrievalError(f"retriever.kind: {settings.kind} has no index of its own to build")
    named = Hybrid.parts(settings)
    parts = [plan_index(part, corpus) for part in named.values()]
    places = {name: os.path.abspath(part.index) if part.index else name for name, part in named.items()}
    return _hybrid_manifest(parts, settings, places)


def _hybrid_manifest(parts: Sequence[Manifest], settings: FusionSettings, places: Mapping[str, str]) -> Manifest:
    return Manifest(
        engine="hybrid",
        settings={"engines": [{"kind": p.engine, **p.settings} for p in parts], **settings.fusion_keys()},
        versions={name: version for part in parts for name, version in part.versions.items()},
        corpus=parts[0].corpus,
        documents=parts[0].documents,
        digest=hybrid_digest([part.digest for part in parts], settings),
        places=dict(places),
    )


def build_index(
    settings: RetrieverSettings, corpus: Documents, directory: Path, progress: Progress | None = None
) -> Manifest:
    """Build an index in place of whatever the directory holds; of a hybrid, those of its two that do not fit.

    Raises:
        RetrievalError: the corpus cannot be indexed, another process is at it, or the disk is full.
    """
    if ENGINES[settings.kind].role == "index":
        return write_index(_index_engine(settings), corpus, directory, progress)
    planned = plan_index(settings, corpus)
    for name, part in ENGINES[settings.kind].load().parts(settings).items():
        _open_or_build(part, corpus, directory / planned.places[name], progress, shared=False)
    return write_manifest(planned, directory)


def model_keys() -> dict[str, str]:
    """The key that names the model, of every kind that has one; of several, the first."""
    return {
        kind: name
        for kind, engine in ENGINES.items()
        for name, field in reversed(engine.settings.model_fields.items())
        if (mark := mark_of(field, RecipePath)) and mark.hub
    }


def check_index(directory: Path, corpus: Documents | None = None) -> Manifest:
    """Read an index through, open it and search it.

    Raises:
        RetrievalError: it is broken, not of ``corpus``, or cannot be opened.
    """
    manifest = read_manifest(directory)
    if manifest.engine == "hybrid":
        open_index(directory)
        for name in ("first", "second"):
            check_index(directory / manifest.places[name], corpus)
        return manifest
    problems = check_files(manifest, directory, content=True)
    if problems:
        raise RetrievalError(f"{directory}: {'; '.join(problems)}; build the index again")
    if corpus is not None:
        manifest.require_corpus(corpus, directory)
    documents = MappedDocuments(directory, manifest.corpus)
    if (stored := documents.content_digest()) != manifest.corpus:
        raise RetrievalError(f"{directory}: its documents are those of corpus {stored}; build the index again")
    _, title, text = next((documents.at(row) for row in range(len(documents))), ("", "", ""))
    open_index(directory).search([f"{title} {text}", ""], 1)
    return manifest


def open_index(path: str | Path) -> Retriever:
    """Open an index directory alone, with the documents that it keeps.

    A downloaded index of ColBERT is taken too, where its collection.tsv lies with it.

    Raises:
        RetrievalError: it is no index, unfinished, broken, or needs a model that is gone.
        MissingDependency: the engine's package is not installed.
    """
    directory = Path(path)
    if PlaidIndex.exists(directory):
        from leret.retrieval.engines.colbert import open_downloaded

        return open_downloaded(directory)
    manifest = read_manifest(directory)
    kind = ENGINES.get(manifest.engine)
    try:
        if kind is not None and kind.role == "index":
            return _open(kind.load().from_manifest(manifest, directory), directory)
        if kind is not None and kind.role == "parts":
            return _open_hybrid(manifest, directory)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RetrievalError(
            f"{directory / MANIFEST}: these are not the settings of an index of kind {manifest.engine} "
            f"({type(error).__name__}: {error}); build the index again"
        ) from error
    raise RetrievalError(f"{directory} is an index of kind {manifest.engine!r}, which this leret does not know")


def _open(engine: IndexEngine, directory: Path) -> Retriever:
    manifest = read_manifest(directory)
    key = stage_key("", input_stamps(directory / MANIFEST, *(directory / name for name in manifest.files)))
    known = completed(directory, "checked", key) is not None  # files of these times were read through before
    problems = check_files(manifest, directory, content=not known)
    if problems:
        raise RetrievalError(f"{directory}: the index is broken ({'; '.join(problems[:3])}); build it again")
    if not known:
        with suppress(OSError):
            mark_completed(directory, "checked", key, {})
    return _from(directory, engine.open(directory, open_documents(manifest, engine, directory)))


def _from(source: Path | RetrieverSettings | None, retriever: Any) -> Retriever:
    retriever.source = source
    return cast(Retriever, retriever)


def retriever_record(retriever: Any, directory: Path) -> dict[str, Any] | None:
    """What `reopen` needs, in JSON values; None where the retriever was not made by `load_retriever` or `open_index`.

    An index that is in memory alone is written into ``directory``; others stay where they are.
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
    """The retriever of a record in ``directory``."""
    if "index" in record:
        return open_index((directory / record["index"]).resolve())
    return load_retriever(RetrieverSettings.model_validate(record["settings"]), None, directory / "cache")


def _open_hybrid(manifest: Manifest, directory: Path) -> Retriever:
    folders = [directory / manifest.places[name] for name in ("first", "second")]
    fusion = FusionSettings(**{name: value for name, value in manifest.settings.items() if name != "engines"})
    if not manifest.equals(_hybrid_manifest([read_manifest(folder) for folder in folders], fusion, manifest.places)):
        raise RetrievalError(f"{directory / MANIFEST} does not fit its two indexes; build the index again")
    first, second = map(open_index, folders)
    return _from(directory, Hybrid(first, second, fusion))


@dataclass(frozen=True)
class OpenRetriever:
    """A retriever that a command named, and what it says of itself.

    Attributes:
        corpus: digest of its corpus; None where it has none.
        documents: in its corpus; None where nobody can count them.
        directory: with the documents; None where they cannot be listed from here.
    """

    retriever: Retriever
    engine: str
    corpus: str | None
    documents: int | None
    directory: Path | None = None

    def ids(self) -> Container[str] | None:
        """Ids of its documents; None where they cannot be listed from here."""
        if self.directory is None or self.corpus is None:
            return None
        return frozenset(MappedDocuments(self.directory, self.corpus))


def open_retriever(index: str, *, token_env: str | None = None) -> OpenRetriever:
    """Open an index directory, or connect to a ``leret`` server.

    Raises:
        ConfigError: the URL is none or holds a password, or the variable is not set.
        RetrievalError: there is no index, it is broken, or the server does not answer.
    """
    if index.startswith(("http://", "https://")):
        if "@" in index:
            raise ConfigError(
                "the server's URL holds no user and no password; put the token in a variable (--token-env)"
            )
        settings = RemoteSettings(urls=(index,), token_env=token_env, retry_for_s=30.0)
        remote = ENGINES["remote"].load()(settings)
        served = remote.served()
        return OpenRetriever(remote, served.engine, served.corpus, served.documents)
    directory = Path(index)
    retriever = open_index(directory)
    if PlaidIndex.exists(directory):
        return OpenRetriever(retriever, "colbert", None, None)
    manifest = read_manifest(directory)
    documents = directory / manifest.places["first"] if manifest.engine == "hybrid" else directory
    return OpenRetriever(retriever, manifest.engine, manifest.corpus, manifest.documents, documents)
