"""``leret index``: build search indexes, and look at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli.options import AsJson, DryRun, FormatOption, SkipInvalid

if TYPE_CHECKING:
    from leret.retrieval.index.manifest import Manifest


app = typer.Typer(help="Build search indexes, and look at them.", no_args_is_help=True)

IndexArgument = Annotated[Path, typer.Argument(metavar="INDEX", help="The index directory.")]
CorpusOption = Annotated[str | None, typer.Option("--corpus", metavar="PATH", help="The corpus file, or hf:NAME.")]


@app.command("build", epilog="Example: leret index build --kind bm25 --corpus c.jsonl --out indexes/mine")
def build(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The index directory to be.")],
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A sampling recipe to take it from.")] = None,
    kind: Annotated[str | None, typer.Option(help="bm25, tantivy, dense, colbert or hybrid.")] = None,
    corpus: CorpusOption = None,
    form: FormatOption = None,
    model: Annotated[str | None, typer.Option(help="Model directory or hub name, of dense and colbert.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of `retriever`: dense.store=hnsw. Repeatable."),
    ] = None,
    skip_invalid: SkipInvalid = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another index that is there.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Index a corpus. The same command goes on where it was stopped, and does nothing when all is done."""
    from leret.cli.console import done, facts, say
    from leret.cli.index_flags import settings_of

    data, settings = settings_of(recipe, kind, corpus, form, model, overrides or [], skip_invalid)
    from leret.cli.progress import shown
    from leret.datasets.load import load_corpus
    from leret.retrieval.index.manifest import Manifest, write_index
    from leret.retrieval.load import engine_of

    out = Path(os.path.abspath(out))
    engine = engine_of(settings)
    documents = load_corpus(
        data.kind,
        data.corpus or data.questions,
        seed=data.seed,
        skip_invalid=data.skip_invalid,
        options=data.options or None,
    )
    planned = Manifest.planned(engine, documents)
    if _is_there(out, planned, force):
        say(f"{out} is this index already; nothing to do")
        facts(planned, {})
        return
    if dry_run:
        say(f"would build {out}")
        facts(planned, _told(planned))
        return
    with shown() as told:
        made = write_index(engine, documents, out, told)
    done(f"{out}: {made.documents:,} documents, {_megabytes(made):.1f} MB")
    facts(made, {})


@app.command("info", epilog="Example: leret index info indexes/mine")
def info(index: IndexArgument, as_json: AsJson = False) -> None:
    """Show what an index directory says of itself."""
    from leret.cli.console import facts, say
    from leret.retrieval.engines.colbert_check import told_of
    from leret.retrieval.engines.colbert_index import Downloaded
    from leret.retrieval.index.manifest import read_manifest

    if Downloaded.is_one(index):
        say(str(index))
        facts(told_of(index))
        return
    manifest = read_manifest(index)
    say(str(index))
    size = f"{_megabytes(manifest):.1f} MB in {len(manifest.files)} files"
    facts(manifest, {**_told(manifest), "size": size})


@app.command("check", epilog="Example: leret index check indexes/mine --corpus c.jsonl")
def check(
    index: IndexArgument,
    corpus: CorpusOption = None,
    form: FormatOption = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Read an index through, open it and search it; with --corpus, compare that with the one it was made from."""
    from leret.cli.console import done
    from leret.cli.index_flags import corpus_of
    from leret.core.errors import ConfigError, RetrievalError
    from leret.retrieval.engines.colbert_index import Downloaded
    from leret.retrieval.index.documents import StoredDocuments
    from leret.retrieval.index.manifest import check_files, read_manifest
    from leret.retrieval.load import open_index

    if corpus is None and (form is not None or skip_invalid):
        raise ConfigError("--format and --skip-invalid say how --corpus is read; name it too, or leave them out")
    if Downloaded.is_one(index):
        from leret.retrieval.engines.colbert_check import check_downloaded

        n = check_downloaded(index, None if corpus is None else corpus_of(corpus, form, skip_invalid))
        done(f"{index}: sound; colbert, {n:,} documents")
        return
    manifest = read_manifest(index)
    problems = check_files(manifest, index, content=True)
    if problems:
        raise RetrievalError(f"{index}: {'; '.join(problems)}; build the index again")
    if corpus is not None:
        manifest.require(corpus_of(corpus, form, skip_invalid), index)
    retriever = open_index(index)
    documents = StoredDocuments(index, manifest.corpus)
    first = next((documents.at(place) for place in range(len(documents))), ("", "", ""))
    retriever.search([f"{first[1]} {first[2]}", ""], 1)
    done(f"{index}: sound; {manifest.engine}, {manifest.documents:,} documents")


def _is_there(out: Path, planned: Manifest, force: bool) -> bool:
    """Is the index there already? Whatever else is there is only replaced when that is an index, and was asked for."""
    from leret.core.errors import RetrievalError
    from leret.retrieval.index.manifest import MANIFEST, read_manifest

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST).is_file():
        raise RetrievalError(f"{out} is there and is no index; name another directory, it is not overwritten")
    try:
        found = read_manifest(out)
    except RetrievalError:
        if force:
            return False
        raise
    if found.is_of(planned):
        return True
    if force:
        return False
    raise RetrievalError(
        f"{out} is another index ({found.engine}, {found.documents} documents of the corpus {found.corpus}); "
        "name another directory, or --force to replace it"
    )


def _told(manifest: Manifest) -> dict[str, Any]:
    return {
        "engine": manifest.engine,
        "documents": manifest.documents,
        "corpus": manifest.corpus,
        "digest": manifest.digest,
        "versions": dict(manifest.versions),
        **{f"setting {name}": "no" if value is False else value for name, value in manifest.settings.items()},
        **manifest.places,
    }


def _megabytes(manifest: Manifest) -> float:
    return sum(size for size, _ in manifest.files.values()) / 1e6
