"""``leret data``: inspect questions and corpora, add candidates to questions, fetch and chunk documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leret.cli import console
from leret.cli.console import (
    CorpusOption,
    FormatOption,
    Overrides,
    QuestionsOption,
    done,
    facts,
    sampling_recipe,
    say,
)
from leret.core.errors import ConfigError

if TYPE_CHECKING:
    from leret.config.data import DataSettings
    from leret.datasets.describe import DataReport
    from leret.datasets.load import Data


_SHOWN = 5
_ANSWER_WIDTH = 80  # characters
_DATA_ENDINGS = (".jsonl", ".json", ".gz", ".zst", ".tsv", ".csv", ".parquet")

app = typer.Typer(
    help="Inspect data, add candidates to questions, chunk documents.",
    no_args_is_help=True,
)


@app.command("inspect", epilog="Example: leret data inspect --questions q.jsonl --corpus c.jsonl")
def inspect(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A sampling recipe.")
    ] = None,
    form: FormatOption = None,
    questions: QuestionsOption = None,
    corpus: CorpusOption = None,
    overrides: Overrides = None,
) -> None:
    """Check and summarize a question file and its corpus. Exit with code 2 if lines are invalid."""
    data = _settings(recipe, form, questions, corpus, overrides or [])
    from leret.datasets.describe import inspect as stage

    report = stage(data.model_copy(update={"skip_invalid": True}))
    _show(report)
    if report.problems and not data.skip_invalid:
        raise typer.Exit(2)


@app.command(
    "episodes",
    epilog="Example: leret data episodes --questions q.jsonl --corpus c.jsonl --out e.jsonl",
)
def episodes(
    questions: Annotated[str, typer.Option(metavar="PATH", help="The question file, or hf:NAME.")],
    corpus: Annotated[str, typer.Option(metavar="PATH", help="The corpus file, or hf:NAME.")],
    out: Annotated[Path, console.output_file("Output file (JSON lines in the chunks format).")],
    candidates: Annotated[
        int, typer.Option(min=2, help="Candidates per question, including gold documents.")
    ] = 10,
) -> None:
    """Add candidates from a corpus to each question: its gold documents and the best other BM25 results."""
    from leret.datasets.load import load

    data = _settings(None, None, questions, corpus, ["data.split=all"])
    n = _write_episodes(load(data), out, candidates)
    facts({"path": out, "n_questions": n}, {})
    done(f"{n:,} questions with {candidates} candidates each (gold documents, then BM25) in {out}")


@app.command(
    "chunk",
    epilog="Example: leret data chunk corpus.jsonl --tokens 253 --tokenizer leret-english-6m --out c.jsonl",
)
def chunk(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="The corpus file, or hf:NAME.")],
    out: Annotated[Path, console.output_file("Output file (a corpus in JSON lines).")],
    tokens: Annotated[
        int, typer.Option(min=8, help="Maximum tokens of title, header and text.")
    ] = 253,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Model directory; default: count words.")
    ] = None,
    header: Annotated[
        str, typer.Option(help="First line of each text, with {title} and {doc_id}.")
    ] = "",
    form: FormatOption = None,
) -> None:
    """Split documents into chunks at sentence ends. A chunk has the id doc#i and its document's id as parent."""
    from leret.datasets.chunk import count_words, token_counter, write_chunks
    from leret.datasets.load import load_corpus

    if Path(corpus).resolve() == out.resolve():
        raise ConfigError(f"--out {out} is the corpus itself; choose another file")
    documents = load_corpus(_settings(None, form, corpus, corpus, []))
    console.warn_of_skipped(corpus, documents.skipped)
    count = token_counter(tokenizer) if tokenizer else count_words
    n = write_chunks(documents, out, tokens, count, header)
    facts({"n_documents": len(documents), "n_chunks": n}, {})
    done(f"{n:,} chunks of {len(documents):,} documents in {out}")


def _write_episodes(data: Data, path: Path, n: int) -> int:
    """Write tasks with ``n`` candidates each, shuffled with the task's id as the seed. Return the number of tasks.

    Results are not comparable to results on a data set's original paragraphs: here gold documents are always present,
    and all other candidates are similar to the question.
    """
    from leret.core.files import write_atomically
    from leret.datasets.splits import rank_of
    from leret.retrieval.engines.bm25 import BM25

    tasks = [task for task in data.tasks if task.gold]
    rankings = BM25.build(data.corpus).search([task.text for task in tasks], n)
    lines = []
    for task, ranking in zip(tasks, rankings, strict=True):
        others = [passage.doc_id for passage in ranking if passage.doc_id not in task.gold]
        n_others = max(0, n - len(task.gold))
        ids = [*task.gold, *others[:n_others]]
        ids.sort(key=lambda id: rank_of(id, 0, task.id))
        chunks = []
        for id in ids:
            document = data.corpus[id]
            chunks.append({"id": id, "title": document.title, "text": document.text})
        values = {
            "id": task.id,
            "question": task.text,
            "chunks": chunks,
            "support": list(task.gold),
            "answers": list(task.answers),
            "type": task.type,
            "hops": task.hops,
            "split": task.split,
        }
        values = {name: value for name, value in values.items() if value}
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines))
    return len(lines)


def _show(report: DataReport) -> None:
    chunks = f" (chunks of {report.n_parents:,})" if report.n_parents else ""
    say(f"{report.n_questions:,} questions, {report.n_documents:,} documents{chunks}")
    coverage = None
    if report.gold_coverage is not None:
        coverage = f"{report.gold_coverage:.1%}"
    n_unused = report.n_unused_documents if any(report.gold) else None
    facts(
        report,
        {
            "splits": report.splits,
            "splits by": "the data set" if report.own_splits else "hash of the id",
            "inputs": report.inputs if set(report.inputs) != {"question"} else None,
            "types": report.types,
            "hops (0: unknown)": {str(hops): n for hops, n in report.hops.items()},
            "gold documents per question": _histogram(report.gold),
            "gold documents in the corpus": coverage,
            "reference answers per question": _histogram(report.answers),
            "measures that apply": _measures(report),
            "words per question": _spread(report.question_words),
            "words per document": _spread(report.document_words) if report.n_documents else None,
            "documents that are never gold": n_unused,
            "duplicate questions": report.duplicate_questions,
            "records merged with an equal question": report.n_merged or None,
            "duplicate documents": report.duplicate_documents,
            "skipped or doubtful": report.skipped or None,
            "corpus digest": report.corpus_digest,
        },
    )
    for question in report.examples:
        line = f"  {question.id}: {question.text}"
        if question.answers:
            answer = " ".join(question.answers[0].split())
            if len(answer) > _ANSWER_WIDTH:
                answer = f"{answer[: _ANSWER_WIDTH - 4]} ..."
            line += f" -> {answer}"
        if question.gold:
            gold = ", ".join(question.gold[:_SHOWN])
            n_more = len(question.gold) - _SHOWN
            more = f" and {n_more} more" if n_more > 0 else ""
            line += f" ({gold}{more})"
        say(line)
    for problem in report.problems:
        say(f"  {problem}")


def _measures(report: DataReport) -> dict[str, str]:
    return {
        "of rankings (recall)": _n_with(report, report.gold, "gold documents"),
        "of answers (f1)": _n_with(report, report.answers, "answers"),
    }


def _n_with(report: DataReport, counts: Mapping[int, int], label: str) -> str:
    n = report.n_questions - counts.get(0, 0)
    if not n:
        return f"none, because no question has {label}"
    return f"{n:,} questions"


def _histogram(counts: Mapping[int, int]) -> dict[str, int]:
    """Group numbers above 4 into ranges of doubling size: 5-8, 9-16, ..."""
    shown: Counter[str] = Counter()
    for number, n in counts.items():
        label = str(number)
        if number > 4:
            high = 1 << (number - 1).bit_length()
            label = f"{high // 2 + 1}-{high}"
        shown[label] += n
    return shown


def _spread(figures: Mapping[str, float]) -> str:
    return "{minimum:g} to {maximum:g}, median {median:g}, mean {mean:.1f}".format_map(figures)


def _settings(
    recipe: str | None,
    form: str | None,
    questions: str | None,
    corpus: str | None,
    overrides: list[str],
) -> DataSettings:
    from leret.config.load import flag_recipe
    from leret.datasets.formats import detect_kind

    values: dict[str, Any] = {"kind": form, "questions": questions, "corpus": corpus}
    values = {name: value for name, value in values.items() if value is not None}
    if recipe is not None:
        if recipe.endswith(_DATA_ENDINGS):
            raise ConfigError(
                f"{recipe} is a data file, not a YAML recipe; "
                "pass data files with --questions and --corpus"
            )
        overrides = overrides + [f"data.{name}={value}" for name, value in values.items()]
        return sampling_recipe(recipe, overrides, ("policy.model",)).data
    if not values:
        raise ConfigError("no data to inspect; pass a sampling recipe, or --questions and --corpus")
    if questions is not None and form is None:
        values["kind"] = detect_kind(questions)
    flags = {f"data.{name}": f"--{name}" for name in values}
    flags["data.kind"] = "--format"
    optional = ("data.corpus",) if corpus is None else ()
    return flag_recipe({"data": values}, flags, overrides, optional).data
