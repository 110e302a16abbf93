"""Facts about a run outside its store: gold documents, titles, systems, pairs, and plots.

`leret view` collects them in another process, so that the server never holds a corpus, NumPy or
matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leret.core.errors import LeretError
from leret.core.runs import Run
from leret.viewer.index import RunIndex, create_facts

Row = tuple[str, Sequence[Any]]
"""(table, values)."""

MAX_DOCUMENTS = 200_000
"""In larger corpora, documents are shown by id, except gold documents."""
_LENGTH = 500


def sources(run: Run) -> list[tuple[str, int]]:
    """Return the files that the facts are read from, with their modification times."""
    files = {
        run.preferences / "train.parquet",
        *run.policies.glob("*/training.json"),
        *run.eval.rglob("summary.json"),
    }
    return sorted((str(file), file.stat().st_mtime_ns) for file in files if file.is_file())


def summaries(run: Run) -> dict[str, dict[str, Any]]:
    """Return the summary of each evaluation by name, the main one (named "") first."""
    paths = {"": run.eval / "summary.json"}
    for path in sorted(run.eval.glob("*/summary.json")):
        paths[path.parent.name] = path
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.is_file()
    }


def label_of(evaluation: str, system: str) -> str:
    """Return the name of an evaluated system in the viewer; the main evaluation is named ""."""
    if not evaluation:
        return system
    return f"{evaluation}/{system}"


def main_measure(summary: Mapping[str, Any]) -> str:
    """Return the measure of plots and differences.

    It is recall, or the first measure if there are no gold documents.
    """
    measures = summary["measures"]
    if "recall" in measures:
        return "recall"
    return next(iter(measures), "")


def command(run: Run, file: Path) -> tuple[str, ...]:
    """Return the command that collects a run's facts in a process of its own."""
    return sys.executable, "-m", "leret.viewer.collect", str(run.path), str(file)


def collect(run: Run, path: Path, *, plots: bool = True) -> None:
    """Write the facts of a run. A part that cannot be read becomes a note."""
    parts: Mapping[str, Callable[[Run], Iterator[Row]]] = {
        "results": _results,
        "questions and gold documents": _tasks,
        "pairs": _pairs,
        "plots": _figures,
    }

    def rows() -> Iterator[Row]:
        for name, part in parts.items():
            if name == "plots" and not plots:
                continue
            try:
                yield from part(run)
            except (LeretError, ValidationError, OSError, KeyError) as error:
                yield "notes", (f"{name}: {error}",)

    create_facts(path, rows())


def complete(index: RunIndex, path: Path, *, plots: bool = True) -> None:
    """Index all samples, and collect the facts into a file at ``path`` in this process."""
    while not index.complete:
        index.advance()
    collect(index.run, path, plots=plots)
    index.use(path)


def _results(run: Run) -> Iterator[Row]:
    from leret.evaluation.results import first_runs, read_rows

    for name, summary in summaries(run).items():
        measure = main_measure(summary)
        if "ap" in summary["measures"]:
            measure = "ap"
        for row in summary["rows"]:
            system = row["system"]
            label = label_of(name, system)
            rows = read_rows(run.eval / name / system / "per_question.parquet")
            for question_id, hops in first_runs(rows).items():
                end: float | None = 0.0  # stays 0 if the run ended before it had a ranking
                for hop in hops:
                    if hop.failure or hop.measures:
                        end = hop.measures.get(measure)
                    values = (
                        label,
                        question_id,
                        hop.hop,
                        hop.query,
                        hop.completion,
                        json.dumps(hop.doc_ids),
                        hop.measures.get("recall"),
                        hop.measures.get("ap"),
                        hop.unparsed,
                        hop.failure,
                    )
                    yield "results", values
                yield "ends", (label, question_id, end)


def _tasks(run: Run) -> Iterator[Row]:
    from leret.rollouts.environment import Environment

    if run.manifest.sampling is None:
        return  # a run of leret.LeReT: its tasks are in no file
    with Environment.open(run) as environment:
        corpus = environment.corpus
        parents = set(corpus.first_chunks)
        doc_ids = set(corpus.parents)
        if len(corpus) <= MAX_DOCUMENTS:
            doc_ids = set(corpus)
        for task in environment.tasks("all", check=False):
            yield "tasks", (task.id, task.text, task.type, json.dumps(task.answers))
            for doc_id in task.gold:
                in_corpus = None
                if len(corpus):
                    in_corpus = doc_id in corpus or doc_id in parents
                yield "gold", (task.id, doc_id, in_corpus)
                if doc_id in corpus:
                    doc_ids.add(doc_id)
        for doc_id in doc_ids:
            document = corpus[doc_id]
            parent = document.parent if environment.recipe.data.gold == "parent" else None
            yield "documents", (doc_id, document.title, document.text[:_LENGTH], parent)


def _pairs(run: Run) -> Iterator[Row]:
    import pyarrow.parquet as pq

    path = run.preferences / "train.parquet"
    columns = [
        "question_id",
        "state_id",
        "step",
        "chosen_id",
        "rejected_id",
        "score_chosen",
        "score_rejected",
    ]
    if not path.is_file():
        return
    for batch in pq.ParquetFile(path).iter_batches(columns=columns):
        for row in batch.to_pylist():
            *ids, chosen, rejected = (row[name] for name in columns)
            yield "pairs", (*ids, chosen - rejected)


def _figures(run: Run) -> Iterator[Row]:
    from leret.evaluation.report.content import curves_of
    from leret.evaluation.report.plots import curves, dumbbells
    from leret.evaluation.systems import training_facts

    for i, (name, summary) in enumerate(summaries(run).items()):
        if not (summary["rows"] and summary["measures"]):
            continue
        measure = main_measure(summary)
        title = f"{measure} by hop"
        if name:
            title += f" · {name}"
        svg = dumbbells(summary["rows"], measure, measure)
        svg = svg.replace(f"dumbbells-{measure}", f"systems-{i}")  # ids
        yield "figures", ("overview", title, svg)
    trainings = training_facts(run)
    for i, (policy, panels) in enumerate(curves_of(trainings)):
        steps = [alarm["step"] for alarm in trainings[policy].get("alarms") or ()]
        svg = curves(f"curves-{i}", "Training curves by step, or by round", panels, marks=steps)
        yield "figures", ("trainings", policy, svg)


if __name__ == "__main__":
    collect(Run.open(Path(sys.argv[1])), Path(sys.argv[2]))
