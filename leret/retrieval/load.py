"""The engines of a recipe that have no index of their own: they ask a server."""

from __future__ import annotations

from pathlib import Path

from leret.config.retriever import (
    ClinicalTrialsSettings,
    ColbertSettings,
    EngineSettings,
    PubMedSettings,
    RetrieverSettings,
)
from leret.core.errors import RetrievalError
from leret.core.progress import Progress
from leret.retrieval.base import Documents, Retriever
from leret.retrieval.engines.analysis import WordSettings
from leret.retrieval.engines.colbert_index import Collection, Downloaded
from leret.retrieval.index.documents import Held
from leret.retrieval.index.manifest import (
    MANIFEST,
    Engine,
    Manifest,
    check_files,
    fitting_documents,
    read_manifest,
    write_index,
)


def is_live(kind: str) -> bool:
    """Does an engine ask a server?"""
    return kind in {"remote", "pubmed", "clinicaltrials"}


def load_live(settings: RetrieverSettings, corpus: Documents | None) -> Retriever:
    """The engine that a recipe names.

    A remote one is asked at once whether it is there: before an LM is. Sites are asked for nothing yet.

    Args:
        settings: whose kind is live.
        corpus: what a remote engine should search; None checks nothing.

    Raises:
        ConfigError: a URL is none, or an environment variable is not set.
        RetrievalError: a remote engine does not answer, is none, or searches another corpus.
    """
    if settings.remote is not None:
        from leret.retrieval.clients.leret import Remote

        remote = Remote(settings.remote, corpus)
        remote.check()
        return remote
    if settings.kind == "pubmed":
        from leret.retrieval.clients.pubmed import PubMed

        return PubMed(settings.pubmed or PubMedSettings())
    from leret.retrieval.clients.clinicaltrials import ClinicalTrials

    return ClinicalTrials(settings.clinicaltrials or ClinicalTrialsSettings())


def load_retriever(
    settings: RetrieverSettings, corpus: Documents | None, cache: Path, told: Progress | None = None
) -> Retriever:
    """Open the index over a corpus; build it where it is missing.

    An index in the cache is made anew where it does not fit. One in a directory that the settings name may be shared
    and costly: there, what does not fit is refused.

    Args:
        settings: of the recipe.
        corpus: what is searched; None where an engine behind HTTP has its own.
        cache: where the index is kept when the settings name no directory.
        told: watches a build.

    Raises:
        RetrievalError: the index cannot be built or opened, or is of another corpus or made with other settings.
    """
    from leret.retrieval.caching import keep_answers

    return keep_answers(_opened(settings, corpus, cache, told), settings.kind, settings.answers)


def _opened(settings: RetrieverSettings, corpus: Documents | None, cache: Path, told: Progress | None) -> Retriever:
    pass

    if is_live(settings.kind):
        return load_live(settings, corpus)
    if corpus is None:
        raise RetrievalError(f"retriever.kind {settings.kind} searches a corpus; name it with data.corpus")
    if settings.kind == "rm3":
        from leret.retrieval.engines.rm3 import RM3

        first = settings.model_copy(update={"kind": "bm25", "rm3": None})
        return RM3.over(_opened(first, corpus, cache, told), settings.rm3)
    engine = engine_of(settings)
    if settings.index:
        return _named(engine, corpus, Path(settings.index), told)
    directory = cache / settings.kind
    try:
        if read_manifest(directory).is_of(Manifest.planned(engine, corpus)):
            return open_index(directory)
    except RetrievalError:
        pass  # missing, broken, of another layout: it can be built again
    write_index(engine, corpus, directory, told)
    return open_index(directory)


def open_index(path: str | Path) -> Retriever:
    """Open an index directory alone, with the documents that it keeps.

    Args:
        path: of the directory; a downloaded index of ColBERT is taken too, where its collection.tsv lies with it.

    Raises:
        RetrievalError: it is no index, half-built, broken, or needs a model that is gone.
        MissingDependency: the engine's package is not installed.
    """
    directory = Path(path)
    if Downloaded.is_one(directory):
        return _downloaded(directory)
    manifest = read_manifest(directory)
    problems = check_files(manifest, directory, content=False)
    if problems:
        raise RetrievalError(f"{directory}: the index is broken ({'; '.join(problems[:3])}); build it again")
    engine = _again(manifest, directory)
    return engine.open(directory, fitting_documents(manifest, engine, directory))


def engine_of(settings: EngineSettings) -> Engine:
    """The engine that settings name.

    Raises:
        RetrievalError: a model that they name is not there.
        MissingDependency: the engine's package is not installed.
    """
    words = WordSettings(settings.stopwords, settings.stemmer, settings.fold_accents)
    if settings.kind == "bm25":
        from leret.retrieval.engines.bm25 import BM25Engine, IndexSettings

        return BM25Engine(IndexSettings(settings.k1, settings.b, words))
    if settings.kind == "tantivy":
        from leret.retrieval.engines.tantivy import TantivyEngine

        return TantivyEngine(words)
    if settings.kind == "dense" and settings.dense is not None:
        from leret.retrieval.engines.dense import DenseEngine

        return DenseEngine.of(settings.dense)
    if settings.kind == "colbert" and settings.colbert is not None:
        from leret.retrieval.engines.colbert import ColbertEngine

        return ColbertEngine.of(settings.colbert)
    if isinstance(settings, RetrieverSettings) and settings.hybrid is not None:
        from leret.retrieval.engines.hybrid import HybridEngine

        first, second = settings.hybrid.engines
        return HybridEngine.of(settings.hybrid, (engine_of(first), engine_of(second)))
    raise RetrievalError(f"retriever.kind: there is no engine {settings.kind!r}")


def _again(manifest: Manifest, directory: Path) -> Engine:
    """The engine that made an index.

    Raises:
        RetrievalError: the manifest names none, lacks a setting or has one too many; or a model is gone.
    """
    try:
        return _made(manifest, directory)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RetrievalError(
            f"{directory / MANIFEST}: these are not the settings of an index of kind {manifest.engine} "
            f"({type(error).__name__}: {error}); build the index again"
        ) from error


def _made(manifest: Manifest, directory: Path) -> Engine:
    if manifest.engine == "bm25":
        from leret.retrieval.engines.bm25 import BM25Engine

        return BM25Engine.again(manifest)
    if manifest.engine == "tantivy":
        from leret.retrieval.engines.tantivy import TantivyEngine

        return TantivyEngine.again(manifest)
    if manifest.engine == "dense":
        from leret.retrieval.engines.dense import DenseEngine

        return DenseEngine.again(manifest, directory)
    if manifest.engine == "colbert":
        from leret.retrieval.engines.colbert import ColbertEngine

        return ColbertEngine.again(manifest, directory)
    if manifest.engine == "hybrid":
        from leret.retrieval.engines.hybrid import FOLDERS, Fusion, HybridEngine

        first, second = (_again(read_manifest(directory / name), directory / name) for name in FOLDERS)
        values = manifest.settings
        weights = (values["weights"][0], values["weights"][1])
        fusion = Fusion(values["fusion"], weights, values["rank_constant"], values["depth"])
        return HybridEngine((first, second), fusion)
    raise RetrievalError(f"{directory} is an index of kind {manifest.engine!r}, which this leret does not know")


def _downloaded(directory: Path) -> Retriever:
    """An index of colbert-ai as it was downloaded, with the collection that lies with it."""
    from leret.retrieval.engines.colbert import ColbertEngine
    from leret.retrieval.engines.plaid import ColBERT

    found = Downloaded.find(directory)
    if found.collection is None:
        raise RetrievalError(
            f"{directory} is an index of ColBERT, and its collection.tsv is not with it; put it there, or run "
            f"`leret index build --kind colbert --set colbert.index_root={directory.parent} "
            f"--set colbert.index_name={directory.name} --corpus PATH --out DIR`"
        )
    engine = ColbertEngine.of(ColbertSettings(index_root=str(directory.parent), index_name=directory.name))
    documents = Collection(found.collection)
    return ColBERT(Held(documents), engine.checkpoint, directory, engine.plaid, engine.digest(documents.digest))


def _named(engine: Engine, corpus: Documents, directory: Path, told: Progress | None) -> Retriever:
    """The index in a directory of the user's."""
    if not directory.exists():
        write_index(engine, corpus, directory, told)
        return open_index(directory)
    manifest, planned = read_manifest(directory), Manifest.planned(engine, corpus)
    manifest.require(corpus, directory)
    if (manifest.engine, manifest.digest) != (planned.engine, planned.digest):
        differs = [
            f"{name}: {manifest.settings.get(name)!r} there, {planned.settings.get(name)!r} in the recipe"
            for name in sorted({*manifest.settings, *planned.settings})
            if manifest.settings.get(name) != planned.settings.get(name)
        ]
        if manifest.engine != planned.engine:
            differs = [f"kind: {manifest.engine} there, {planned.engine} in the recipe"]
        raise RetrievalError(
            f"{directory} is an index with other settings ({'; '.join(differs)}); "
            "correct the recipe, or name another directory under retriever.index"
        )
    return open_index(directory)
