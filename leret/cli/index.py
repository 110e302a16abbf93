"""``leret index``: build and check search indexes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import CorpusOption, DryRun, FormatOption, Overrides
from leret.core.errors import ConfigError, RetrievalError
from leret.core.files import require_writable
from leret.core.progress import shown

if TYPE_CHECKING:
    from leret.config.data import DataSettings
    from leret.config.retriever import RetrieverSettings
    from leret.retrieval.index.manifest import Manifest


app = typer.Typer(help="Build and check search indexes.", no_args_is_help=True)

_FLAGS = {"data.kind": "--format", "data.corpus": "--corpus"}


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
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing index.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Build an index of a corpus. Run the same command again to resume; a complete index is left unchanged."""
    from leret.datasets.load import load_corpus
    from leret.retrieval.load import build_index, plan_index

    changes = [_of_retriever(override) for override in overrides or []]
    if recipe is not None:
        flags = {"--kind": kind, "--corpus": corpus, "--format": form}
        data, settings = _recipe_settings(recipe, flags, changes)
    else:
        data, settings = _flag_settings(kind, corpus, form, changes)
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


@app.command("check", epilog="Example: leret index check indexes/mine --corpus c.jsonl")
def check(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The index directory.")],
    corpus: CorpusOption = None,
    form: FormatOption = None,
    overrides: Overrides = None,
) -> None:
    """Read all files of an index, search it, and show what it holds. With --corpus, compare it with that corpus."""
    from leret.config.load import flag_recipe
    from leret.datasets.load import load_corpus
    from leret.retrieval.load import check_index

    if corpus is None and (form is not None or overrides):
        raise ConfigError("--format and --set need --corpus; add --corpus PATH or remove them")
    documents = None
    if corpus is not None:
        recipe = {"data": _data(corpus, form)}
        settings = flag_recipe(recipe, _FLAGS, overrides or (), ("data.questions",))
        documents = load_corpus(settings.data)
    manifest = check_index(index, documents)
    console.done(f"{index}: no faults; {manifest.engine}, {manifest.size}")
    size = f"{_megabytes(manifest):.1f} MB in {len(manifest.files)} files"
    console.facts(manifest.model_dump(exclude_none=True), {**_rows(manifest), "size": size})


def _of_retriever(override: str) -> str:
    """Return an override of a recipe for KEY=VALUE, where KEY without a section is a key of the retriever."""
    if override.startswith(("retriever.", "data.")):
        return override
    return f"retriever.{override}"


def _recipe_settings(
    recipe: str, flags: Mapping[str, str | None], changes: list[str]
) -> tuple[DataSettings, RetrieverSettings]:
    used = [flag for flag, value in flags.items() if value is not None]
    if used:
        raise ConfigError(
            f"{recipe} already sets retriever and corpus; remove {', '.join(used)}, or the recipe"
        )
    settings = console.sampling_recipe(recipe, changes, ("policy.model",))
    return settings.data, settings.retriever


def _flag_settings(
    kind: str | None, corpus: str | None, form: str | None, changes: list[str]
) -> tuple[DataSettings, RetrieverSettings]:
    from leret.config.load import flag_recipe

    if corpus is None or kind is None:
        raise ConfigError("no index to build; pass a sampling recipe, or --kind and --corpus")
    flags = {**_FLAGS, "retriever.kind": "--kind"}
    for key in ("model", "checkpoint", "engines"):
        flags[f"retriever.{key}"] = f"--set {key}"
    recipe = {"data": _data(corpus, form), "retriever": {"kind": kind}}
    settings = flag_recipe(recipe, flags, changes, ("data.questions",))
    return settings.data, settings.retriever


def _data(corpus: str, form: str | None) -> dict[str, Any]:
    return {"kind": form or "jsonl", "corpus": corpus, "questions": corpus}


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
    return manifest.model_dump(exclude={"files", "format"}, exclude_none=True)


def _megabytes(manifest: Manifest) -> float:
    return sum(size for size, _ in manifest.files.values()) / 1e6
