"""``leret search``: use a retriever without a program, for one query or for measuring it on questions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leret.cli import console
from leret.cli.console import IndexOrUrl, Overrides, QuestionsOption, TokenEnv
from leret.core.errors import ConfigError
from leret.core.progress import shown, visible

if TYPE_CHECKING:
    from rich.text import Text

    from leret.core.types import Ranking, Task
    from leret.retrieval.load import OpenRetriever

_SHOWN = 240


def search(
    index: IndexOrUrl,
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="The search query.")] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", min=1, help="Number of documents to show.", show_default="10"),
    ] = None,
    questions: QuestionsOption = None,
    measures: Annotated[
        str, typer.Option(help="R@k, P@k, Success@k, AP, RR, nDCG, Rprec; comma-separated.")
    ] = "R@10,AP",
    overrides: Overrides = None,
    out: Annotated[
        Path | None, console.output_directory("Directory for TREC files and summary.json.")
    ] = None,
    token_env: TokenEnv = None,
) -> None:
    """Search an index or a retrieval server for QUERY, or for all questions of a file, and measure the rankings."""
    from leret.evaluation.retriever import parse_measures
    from leret.retrieval.load import open_retriever

    if (query is None) == (questions is None):
        raise ConfigError("pass either a query, or a question file with --questions PATH")
    if query is not None:
        if overrides or out is not None:
            raise ConfigError("--set and --out need --questions PATH; remove them or the query")
        return _search_query(open_retriever(index, token_env=token_env), query, k or 10)
    if k is not None:
        raise ConfigError(
            f"-k {k} needs a query; measures name their own cut-off, as in --measures R@{k}; remove -k"
        )
    names = parse_measures(measures.split(","))
    retriever = open_retriever(index, token_env=token_env)
    tasks = _load(str(questions), overrides or [], retriever)
    _measure(index, retriever, tasks, names, out)


def _search_query(retriever: OpenRetriever, query: str, k: int) -> None:
    ranking = retriever.retriever.search([query], k)[0]
    if not console.is_json():
        if not ranking:
            return console.say("no results")
        return _show_ranking(ranking, query)
    rows = []
    for rank, passage in enumerate(ranking, start=1):
        row = {"rank": rank, "doc_id": passage.doc_id, "title": passage.title}
        rows.append({**row, "text": passage.text, "score": passage.score})
    console.facts({"query": query, "ranking": rows})


def _show_ranking(ranking: Ranking, query: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("document", overflow="fold", max_width=40)
    table.add_column("text", overflow="fold")
    words = [word for word in re.findall(r"\w+", query[:10_000]) if len(word) > 1]
    for rank, passage in enumerate(ranking, start=1):
        name = passage.doc_id
        if passage.title not in {"", name}:
            name = f"{passage.title} ({name})"
        score = f"{passage.score:.4g}"
        table.add_row(str(rank), score, _marked(name, words), _marked(passage.text, words))
    console.draw(table)


def _marked(text: str, words: Sequence[str]) -> Text:
    from rich.text import Text

    marked = Text(visible(" ".join(text.split())))
    marked.truncate(_SHOWN, overflow="ellipsis")
    marked.highlight_words(words, "bold yellow", case_sensitive=False)
    return marked


def _measure(
    index: str, retriever: OpenRetriever, tasks: list[Task], names: Sequence[str], out: Path | None
) -> None:
    """Print a retriever's measures on questions with known relevant documents, and write TREC files to ``out``."""
    from leret.evaluation.retriever import evaluate_retriever

    with shown() as progress:
        report = evaluate_retriever(retriever.retriever, tasks, names, progress)
    if not any(report.measures.values()):
        console.complain(
            f"no ranking has a relevant document; check that the questions belong to {index}",
            "warning: ",
        )
    if out is not None:
        report.save(out)
    rows = []
    for name, value in report.measures.items():
        low, high = report.intervals[name]
        rows.append((name, f"{value:.4f}", f"[{low:.4f}, {high:.4f}]"))
    title = f"{len(tasks):,} questions, {index} ({retriever.engine})"
    console.table(("measure", "mean", "95% interval"), rows, title, values=report.brief())
    if report.n_empty:
        console.say(f"{report.n_empty:,} questions have no results and count as 0")
    rate = len(tasks) / max(report.seconds, 1e-9)
    console.say(f"at most {report.depth} documents per question; {rate:,.0f} questions/s")
    if out is not None:
        console.done(
            f"{out}/run.trec  {out}/qrels.trec  {out}/summary.json  {out}/per_question.jsonl"
        )


def _load(questions: str, overrides: list[str], retriever: OpenRetriever) -> list[Task]:
    from leret.config.load import flag_recipe
    from leret.datasets.formats import detect_kind
    from leret.datasets.load import load_tasks

    kinds = [override for override in overrides if override.startswith("data.kind=")]
    data = {
        "kind": "jsonl" if kinds else detect_kind(questions),
        "questions": questions,
        "split": "all",
    }
    flags = {"data.questions": "--questions"}
    settings = flag_recipe({"data": data}, flags, overrides, ("data.corpus",)).data
    documents = retriever.table()
    corpus = () if documents is None else (frozenset(documents), documents.parents)
    tasks = load_tasks(settings, *corpus)
    console.warn_of_skipped(questions, tasks.skipped)
    return list(tasks)
