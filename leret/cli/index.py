"""``leret index``: build, inspect and check search indexes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import AsJson, DryRun, FormatOption, RetrieverOverrides, SkipInvalid
from leret.core.errors import ConfigError, RetrievalError
from leret.core.files import require_writable
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.data import DataSettings
    from leret.config.retriever import RetrieverSettings
    from leret.retrieval.index.manifest import Manifest


app = typer.Typer(help="Build, inspect and check search indexes.", no_args_is_help=True)

_FLAGS = {"data.kind": "--format", "data.corpus": "--corpus"}
IndexArgument = Annotated[Path, typer.Argument(metavar="INDEX", help="The index directory.")]
CorpusOption = Annotated[
    str | None, typer.Option("--corpus", metavar="PATH", help="The corpus file, or hf:NAME.")
]


@app.command(
    "build", epilog="Example: leret index build --kind bm25 --corpus c.jsonl --out indexes/mine"
)
def build(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the index.")],
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A sampling recipe with the retriever and corpus."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Kind of index: bm25, tantivy, dense, colbert or hybrid.")
    ] = None,
    corpus: CorpusOption = None,
    form: FormatOption = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub name (dense, colbert).")
    ] = None,
    overrides: RetrieverOverrides = None,
    skip_invalid: SkipInvalid = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing index.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Build an index of a corpus. Run the same command again to resume; a complete index is left unchanged."""
    from leret.datasets.load import load_corpus
    from leret.retrieval.load import build_index, plan_index

    changes = [f"retriever.{override.removeprefix('retriever.')}" for override in overrides or []]
    if recipe is not None:
        flags = {
            "--kind": kind,
            "--corpus": corpus,
            "--format": form,
            "--model": model,
            "--skip-invalid": skip_invalid or None,
        }
        used = [flag for flag, value in flags.items() if value is not None]
        if used:
            raise ConfigError(
                f"{recipe} already sets retriever and corpus; remove {', '.join(used)}, or the recipe"
            )
        whole = console.sampling_recipe(recipe, changes, ("policy.model",))
        data = whole.data
        settings = whole.retriever
    else:
        data, settings = _flag_settings(kind, corpus, form, model, changes, skip_invalid)
    out = Path(os.path.abspath(out))
    if not out.exists():
        require_writable(out, "--out")
    documents = load_corpus(data)
    console.warn_of_skipped("corpus", documents.skipped)
    planned = plan_index(settings, documents)
    if _exists(out, planned, force):
        console.say(f"nothing to do: {out} is already built")
        return console.facts(planned.model_dump(exclude_none=True), {})
    if dry_run:
        console.say(f"would build {out}")
        return console.facts(planned.model_dump(exclude_none=True), _rows(planned))
    with shown() as progress:
        manifest = build_index(settings, documents, out, progress)
    console.done(f"{out}: {manifest.size}, {_megabytes(manifest):.1f} MB")
    console.facts(manifest.model_dump(exclude_none=True), {})


@app.command("info", epilog="Example: leret index info indexes/mine")
def info(index: IndexArgument, as_json: AsJson = False) -> None:
    """Show an index's manifest."""
    from leret.retrieval.index.manifest import read_manifest

    manifest = read_manifest(index)
    console.say(str(index))
    size = f"{_megabytes(manifest):.1f} MB in {len(manifest.files)} files"
    console.facts(manifest.model_dump(exclude_none=True), {**_rows(manifest), "size": size})


@app.command("check", epilog="Example: leret index check indexes/mine --corpus c.jsonl")
def check(
    index: IndexArgument,
    corpus: CorpusOption = None,
    form: FormatOption = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Read all files of an index, open it and search it. With --corpus, check that it was built from that corpus."""
    from leret.config.load import flag_recipe
    from leret.datasets.load import load_corpus
    from leret.retrieval.load import check_index

    if corpus is None and (form is not None or skip_invalid):
        raise ConfigError(
            "--format and --skip-invalid need --corpus; add --corpus PATH or remove the flags"
        )
    documents = None
    if corpus is not None:
        recipe = {"data": _data(corpus, form, skip_invalid)}
        documents = load_corpus(flag_recipe(recipe, _FLAGS, (), ("data.questions",)).data)
    manifest = check_index(index, documents)
    console.done(f"{index}: no faults; {manifest.engine}, {manifest.size}")


def _flag_settings(
    kind: str | None,
    corpus: str | None,
    form: str | None,
    model: str | None,
    changes: list[str],
    skip_invalid: bool,
) -> tuple[DataSettings, RetrieverSettings]:
    from leret.config.load import flag_recipe
    from leret.retrieval.load import model_keys

    if corpus is None or kind is None:
        raise ConfigError("no index to build; pass a sampling recipe, or --kind and --corpus")
    keys = model_keys()
    retriever: dict[str, Any] = {"kind": kind}
    if model is not None:
        if kind not in keys:
            raise ConfigError(
                f"--kind {kind} takes no model; remove --model {model} or use --kind {'|'.join(keys)}"
            )
        retriever[keys[kind]] = model
    elif kind in keys and not changes:
        raise ConfigError(
            f"--kind {kind} needs --model, a model directory or hub name (retriever.{keys[kind]})"
        )
    if kind == "hybrid" and not any(change.startswith("retriever.engines") for change in changes):
        raise ConfigError(
            "--kind hybrid needs two engines; add --set 'engines=[{kind: bm25}, {kind: tantivy}]'"
        )
    flags = {**_FLAGS, "retriever.kind": "--kind"}
    for key in keys.values():
        flags[f"retriever.{key}"] = "--model"
    recipe = {"data": _data(corpus, form, skip_invalid), "retriever": retriever}
    settings = flag_recipe(recipe, flags, changes, ("data.questions",))
    return settings.data, settings.retriever


def _data(corpus: str, form: str | None, skip_invalid: bool) -> dict[str, Any]:
    return {
        "kind": form or "jsonl",
        "corpus": corpus,
        "questions": corpus,
        "skip_invalid": skip_invalid,
    }


def _exists(out: Path, planned: Manifest, force: bool) -> bool:
    """Return True if ``out`` is the planned index. Raise RetrievalError if ``out`` cannot be replaced."""
    from leret.retrieval.index.manifest import MANIFEST, read_manifest

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST).is_file():
        raise RetrievalError(
            f"{out} exists and is not an index; choose another directory with --out"
        )
    try:
        manifest = read_manifest(out)
    except RetrievalError:
        if force:
            return False
        raise
    if manifest.equals(planned) or force:
        return manifest.equals(planned)
    raise RetrievalError(
        f"{out} holds a different index ({manifest.engine}, {manifest.documents} documents, corpus {manifest.corpus}); "
        "choose another directory, or pass --force to replace the index"
    )


def _rows(manifest: Manifest) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "engine": manifest.engine,
        "documents": manifest.documents,
        "chunks of": f"{manifest.parents:,} documents" if manifest.parents else None,
        "corpus": manifest.corpus,
        "digest": manifest.digest,
        "versions": dict(manifest.versions),
    }
    for name, value in manifest.settings.items():
        rows[f"setting {name}"] = "no" if value is False else value
    return rows | dict(manifest.places)


def _megabytes(manifest: Manifest) -> float:
    return sum(size for size, _ in manifest.files.values()) / 1e6
