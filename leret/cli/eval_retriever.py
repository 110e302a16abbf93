"""``leret eval-retriever``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leret.cli.console import AsJson, IndexOrUrl, SkipInvalid, TokenEnv, complain, done, say, shown, table

if TYPE_CHECKING:
    from leret.evaluation.retriever import RetrieverReport
    from leret.retrieval.load import OpenRetriever


_FLAGS = {"data.kind": "--format", "data.questions": "--questions", "data.split": "--split", "data.limit": "--limit"}


def eval_retriever(
    index: IndexOrUrl,
    questions: Annotated[str, typer.Option(metavar="PATH", help="Questions with their relevant documents.")],
    measures: Annotated[str, typer.Option(help="R@k, AP, RR, nDCG@k, Success@k, P@k, with commas.")] = "R@10,AP",
    form: Annotated[
        str | None, typer.Option("--format", help="Of the questions' file.", show_default="told by its first record")
    ] = None,
    split: Annotated[str, typer.Option(help="train, dev, test or all.")] = "all",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Documents a question.", show_default="100, or as needed")
    ] = None,
    rm3: Annotated[bool, typer.Option("--rm3", help="Expand queries by RM3; the index must be of kind bm25.")] = False,
    fb_docs: Annotated[int, typer.Option(min=1, help="Of RM3: feedback documents.")] = 10,
    fb_terms: Annotated[int, typer.Option(min=0, help="Of RM3: feedback terms.")] = 10,
    original_weight: Annotated[float, typer.Option(min=0, max=1, help="Of RM3: of the query's own words.")] = 0.5,
    rewrites: Annotated[
        Path | None, typer.Option(metavar="PATH", help='Search for these instead: JSON lines {"id", "query"}.')
    ] = None,
    fuse: Annotated[bool, typer.Option("--fuse", help="Fuse what question and rewrite find.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="For run.trec, qrels.trec, summary.json.")] = None,
    as_json: AsJson = False,
    resamples: Annotated[int, typer.Option(min=1, help="Of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of --limit and of the bootstrap.")] = 0,
    token_env: TokenEnv = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Measure a retriever on questions whose relevant documents are known."""
    from leret.config.load import flag_recipe
    from leret.config.retriever import RM3Settings
    from leret.core.errors import ConfigError
    from leret.datasets.formats import detect_kind
    from leret.datasets.load import load_tasks
    from leret.evaluation import retriever as ir
    from leret.evaluation.retriever import depth_for, evaluate_retriever, read_rewrites
    from leret.retrieval.load import open_retriever

    if fuse and rewrites is None:
        raise ConfigError("--fuse fuses the question with its rewrite; name the rewritten queries with --rewrites")
    names = measures.split(",")
    depth_for(list(ir.parsed(names)), depth)  # a mistake in them is told before anything is opened
    queries = None if rewrites is None else read_rewrites(rewrites)
    opened = open_retriever(index, token_env=token_env)
    given = {"kind": form or detect_kind(questions), "questions": questions, "split": split, "limit": limit}
    data = flag_recipe({"data": {**given, "seed": seed, "skip_invalid": skip_invalid}}, _FLAGS).data
    loaded = load_tasks(data, opened.ids())
    if loaded.skipped:
        complain(f"{sum(loaded.skipped.values())} bad lines of {questions} are left out", "warning: ")
    retriever = opened.retriever
    if rm3:
        from leret.retrieval.engines.rm3 import RM3

        settings = RM3Settings(fb_docs=fb_docs, fb_terms=fb_terms, original_weight=original_weight)
        retriever = RM3(retriever, settings)
    with shown() as progress:
        report = evaluate_retriever(
            retriever,
            list(loaded),
            names,
            rewrites=queries,
            fuse=fuse,
            depth=depth,
            resamples=resamples,
            seed=seed,
            progress=progress,
        )
    if not report.finds_gold:
        complain(f"no relevant document was found; are {questions} questions about what {index} holds?", "warning: ")
    if out is not None:
        report.save(out)
    _show(report, opened, index, out)


def _show(report: RetrieverReport, opened: OpenRetriever, index: str, out: Path | None) -> None:

    n = len(report.questions)
    rows = [
        (name, f"{value:.4f}", f"[{report.intervals[name][0]:.4f}, {report.intervals[name][1]:.4f}]")
        for name, value in report.measures.items()
    ]
    title = f"{n:,} questions, {report.system}, {index} ({opened.engine})"
    table(("measure", "mean", "95 % interval"), rows, title, values=report.brief())
    if report.n_empty:
        say(f"nothing was found for {report.n_empty:,} of them; they count with 0")
    say(f"{report.depth} documents a question at most; {n / max(report.seconds, 1e-9):,.0f} questions/s")
    if out is not None:
        done(f"{out}/run.trec  {out}/qrels.trec  {out}/summary.json  {out}/per_question.jsonl")
