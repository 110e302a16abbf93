"""``leret search`` and ``leret eval-retriever``: a retriever alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import AsJson, IndexOrUrl, SkipInvalid, TokenEnv
from leret.core.progress import plain, shown

if TYPE_CHECKING:
    from rich.text import Text

    from leret.core.types import Ranking, Task
    from leret.evaluation.retriever import RetrieverReport
    from leret.retrieval.load import OpenRetriever

_SHOWN = 240
_FLAGS = {"data.kind": "--format", "data.questions": "--questions", "data.split": "--split", "data.limit": "--limit"}


def search(
    index: IndexOrUrl,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to search for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Documents to show.")] = 10,
    token_env: TokenEnv = None,
    as_json: AsJson = False,
) -> None:
    """Search an index, or a retrieval server; --json shows texts whole."""
    from leret.retrieval.load import open_retriever

    ranking = open_retriever(index, token_env=token_env).retriever.search([query], k)[0]
    if as_json:
        rows = [
            {"rank": rank, "doc_id": found.doc_id, "title": found.title, "text": found.text, "score": found.score}
            for rank, found in enumerate(ranking, start=1)
        ]
        console.facts({"query": query, "ranking": rows})
    elif ranking:
        _show_ranking(ranking, query)
    else:
        console.say("nothing was found")


def _show_ranking(ranking: Ranking, query: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("document", overflow="fold", max_width=40)
    table.add_column("text", overflow="fold")
    pattern = _pattern(query)
    for rank, found in enumerate(ranking, start=1):
        named = found.doc_id if found.title in {"", found.doc_id} else f"{found.title} ({found.doc_id})"
        table.add_row(
            str(rank), f"{found.score:.4g}", _marked(named, pattern), _marked(_part(found.text, pattern), pattern)
        )
    console.draw(table)


def _pattern(query: str) -> Any:
    """Finds the words of the query in a text, small or capital; None where there are none."""
    import re

    words = {word for word in re.findall(r"\w+", query[:10_000]) if len(word) > 1}
    longest = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, longest))})\b", re.IGNORECASE) if words else None


def _part(text: str, pattern: Any) -> str:
    """As much of a text as the table holds, from shortly before the first word of the query."""
    first = pattern.search(text) if pattern is not None else None
    start = max(0, first.start() - _SHOWN // 4) if first is not None and first.start() > _SHOWN // 2 else 0
    end = start + _SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _marked(text: str, pattern: Any) -> Text:
    """Text for a terminal, in which words of the query stand out."""
    from rich.text import Text

    marked = Text(plain(" ".join(text.split())))
    if pattern is not None:
        marked.highlight_regex(pattern, "bold yellow")
    return marked


def eval_retriever(
    index: IndexOrUrl,
    questions: Annotated[str, typer.Option(metavar="PATH", help="Questions with their relevant documents.")],
    measures: Annotated[str, typer.Option(help="R@k, AP, RR, nDCG@k, Success@k, P@k, with commas.")] = "R@10,AP",
    form: Annotated[str | None, typer.Option("--format", help="Of the questions; told by the first record.")] = None,
    split: Annotated[str, typer.Option(help="train, dev, test or all.")] = "all",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Documents a question; 100, or as needed.")] = None,
    rm3: Annotated[bool, typer.Option("--rm3", help="Expand queries by RM3; the index must be of kind bm25.")] = False,
    fb_docs: Annotated[int, typer.Option(min=1, help="Of RM3: feedback documents.")] = 10,
    fb_terms: Annotated[int, typer.Option(min=0, help="Of RM3: feedback terms.")] = 10,
    original_weight: Annotated[float, typer.Option(min=0, max=1, help="Of RM3: of the query's own words.")] = 0.5,
    rewrites: Annotated[Path | None, typer.Option(help='Search for these: JSON lines {"id", "query"}.')] = None,
    fuse: Annotated[bool, typer.Option("--fuse", help="Fuse what question and rewrite find.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="For run.trec, qrels.trec, summary.json.")] = None,
    as_json: AsJson = False,
    resamples: Annotated[int, typer.Option(min=1, help="Of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of --limit and of the bootstrap.")] = 0,
    token_env: TokenEnv = None,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Measure a retriever on questions whose relevant documents are known."""
    from leret.evaluation.retriever import evaluate_retriever
    from leret.retrieval.load import open_retriever

    names, texts = measures.split(","), _rewrites(measures, depth, rewrites, fuse)
    opened = open_retriever(index, token_env=token_env)
    data = {"kind": form, "questions": questions, "split": split, "limit": limit, "seed": seed}
    tasks, engine = _load({**data, "skip_invalid": skip_invalid}, opened), opened.retriever
    if rm3:
        from leret.config.retriever import RM3Settings
        from leret.retrieval.engines.rm3 import RM3

        engine = RM3(engine, RM3Settings(fb_docs=fb_docs, fb_terms=fb_terms, original_weight=original_weight))
    with shown() as bar:
        report = evaluate_retriever(
            engine, tasks, names, rewrites=texts, fuse=fuse, depth=depth, resamples=resamples, seed=seed, progress=bar
        )
    _show_measures(report, opened, questions, index, out)


def _rewrites(measures: str, depth: int | None, path: Path | None, fuse: bool) -> dict[str, str] | None:
    """Rewritten queries by question id, if there are any; mistakes in flags are told before anything is opened."""
    from leret.core.errors import ConfigError
    from leret.evaluation.retriever import depth_for, parse_measures, read_rewrites

    if fuse and path is None:
        raise ConfigError("--fuse fuses the question with its rewrite; name the rewritten queries with --rewrites")
    depth_for(list(parse_measures(measures.split(","))), depth)
    return None if path is None else read_rewrites(path)


def _load(given: dict[str, Any], opened: OpenRetriever) -> list[Task]:
    from leret.config.load import flag_recipe
    from leret.datasets.formats import detect_kind
    from leret.datasets.load import load_tasks

    given["kind"] = given["kind"] or detect_kind(given["questions"])
    loaded = load_tasks(flag_recipe({"data": given}, _FLAGS, (), ("data.corpus",)).data, opened.ids())
    if n := sum(loaded.skipped.values()):
        console.complain(f"{n} records of {given['questions']} are left out: {', '.join(loaded.skipped)}", "warning: ")
    return list(loaded)


def _show_measures(
    report: RetrieverReport, opened: OpenRetriever, questions: str, index: str, out: Path | None
) -> None:
    if not report.finds_gold:
        what = f"no relevant document was found; are {questions} questions about what {index} holds?"
        console.complain(what, "warning: ")
    if out is not None:
        report.save(out)
    n = len(report.questions)
    rows = [
        (name, f"{value:.4f}", f"[{report.intervals[name][0]:.4f}, {report.intervals[name][1]:.4f}]")
        for name, value in report.measures.items()
    ]
    title = f"{n:,} questions, {report.system}, {index} ({opened.engine})"
    console.table(("measure", "mean", "95 % interval"), rows, title, values=report.brief())
    if report.n_empty:
        console.say(f"nothing was found for {report.n_empty:,} of them; they count with 0")
    console.say(f"{report.depth} documents a question at most; {n / max(report.seconds, 1e-9):,.0f} questions/s")
    if out is not None:
        console.done(f"{out}/run.trec  {out}/qrels.trec  {out}/summary.json  {out}/per_question.jsonl")
