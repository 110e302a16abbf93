"""``leret search``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli.console import AsJson, IndexOrUrl, TokenEnv, draw, facts, plain, say

if TYPE_CHECKING:
    from rich.text import Text

    from leret.core.types import Ranking


_SHOWN = 240
"""Characters of a text in the table."""


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
        facts({"query": query, "ranking": rows})
    elif ranking:
        _show(ranking, query)
    else:
        say("nothing was found")


def _show(ranking: Ranking, query: str) -> None:
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
    draw(table)


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
