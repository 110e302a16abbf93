"""Facts about a run outside its store: gold documents, titles, systems, differences and pairs.

`leret view` collects them in another process, so that the server never holds a corpus or NumPy.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leret.config.evaluation import main_measure
from leret.core.errors import LeretError, import_optional
from leret.core.runs import Run
from leret.sampling.store.store import connect
from leret.viewer.index import RunIndex, create_facts, with_store

Row = tuple[str, Sequence[Any]]
"""(table, values)."""

MAX_DOCUMENTS = 200_000
"""In larger corpora, documents are shown by id, except gold documents."""
_LENGTH = 500
_SAMPLED = "ifnull(json_extract(components, '$.sampled'), 1)"
_REWARDS = f"SELECT 'Rewards', step, reward FROM samples WHERE reward NOTNULL AND {_SAMPLED}"
_TOKEN_IDS = "SELECT token_ids FROM samples WHERE logprobs NOTNULL"
_COLUMN = "SELECT 1 FROM pragma_table_info('samples') WHERE name = ?"
"""Whether ``samples`` has a column, which stores of earlier versions may lack."""

_CUTS = (
    "SELECT policy_digest, count(*) FROM samples WHERE ifnull({ends}, iif(ifnull("
    f"n_completion_tokens, 0) >= max_tokens, 'length', 'stop')) = 'length' AND {_SAMPLED} "
    "GROUP BY policy_digest"
)
"""Completions that ended at ``max_tokens``, as `leret.sampling.store.store.sample_of` knows them."""


def sources(run: Run) -> list[tuple[str, int]]:
    """Return the files that the facts are read from, with their modification times."""
    files = {
        run.preferences / "train.parquet",
        *run.policies.glob("*/training.json"),
        *run.eval.rglob("summary.json"),
    }
    return sorted((str(file), file.stat().st_mtime_ns) for file in files if file.is_file())


def label_of(evaluation: str, system: str) -> str:
    """Return the name of an evaluated system in the viewer; the main evaluation is named ""."""
    if not evaluation:
        return system
    return f"{evaluation}/{system}"


def command(run: Run, file: Path) -> tuple[str, ...]:
    """Return the command that collects a run's facts in a process of its own."""
    return sys.executable, "-m", "leret.viewer.collect", str(run.path), str(file)


def collect(run: Run, path: Path) -> None:
    """Write the facts of a run. A part that cannot be read becomes a note."""
    run = with_store(run, path)
    parts: Mapping[str, Callable[[Run], Iterator[Row]]] = {
        "results": _results,
        "questions and gold documents": _tasks,
        "pairs": _pairs,
        "differences": _evaluations,
        "rewards": _samples,
        "tokens": _tokens,
    }

    def rows() -> Iterator[Row]:
        for name, part in parts.items():
            try:
                yield from part(run)
            except (LeretError, ValidationError, OSError, KeyError) as error:
                yield "notes", (f"{name}: {error}",)

    create_facts(path, rows())


def complete(index: RunIndex, path: Path) -> None:
    """Index all samples, and collect the facts into a file at ``path`` in this process."""
    while not index.complete:
        index.advance()
    collect(index.run, path)
    index.use(path)


def _results(run: Run) -> Iterator[Row]:
    from leret.evaluation.results import first_runs, read_rows

    for name, summary in run.summaries().items():
        measure = main_measure(summary["measures"])
        if "ap" in summary["measures"]:
            measure = "ap"
        for number, row in enumerate(summary["rows"]):
            system = row["system"]
            label = label_of(name, system)
            rows = read_rows(run.eval / name / system / "per_question.parquet")
            for question_id, hops in first_runs(rows).items():
                end: float | None = 0.0  # stays 0 if the run ended before it had a ranking
                for hop in hops:
                    if hop.failure or hop.measures:
                        end = hop.measures.get(measure)
                    values = (
                        number,
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
    """Yield preference pairs, and their margins by step."""
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
            margin = chosen - rejected
            yield "pairs", (*ids, margin)
            yield "amounts", ("Margins", row["step"], margin)


def _evaluations(run: Run) -> Iterator[Row]:
    """Yield the headline, labels and main measures of each evaluation, and differences of all systems."""
    from leret.evaluation.measures import LABELS
    from leret.evaluation.report.comparison import every_difference
    from leret.evaluation.summary import headline, main_measures

    for name, summary in run.summaries().items():
        measures = summary["measures"]
        if not summary["rows"]:
            continue
        differences: dict[str, dict[str, Any]] = {}
        for pair in every_difference(run, summary):
            differences.setdefault(pair["a"], {})[pair["b"]] = pair
        about = {
            "headline": headline(summary),
            "labels": LABELS,
            "main": main_measures(measures),
            "differences": differences,
        }
        yield "evaluations", (name, json.dumps(about))


def _samples(run: Run) -> Iterator[Row]:
    """Yield rewards by step, and the completions that were cut, by policy."""
    with closing(connect(run.store, read_only=True)) as store:
        has_ends = store.execute(_COLUMN, ("finish_reason",)).fetchone()
        cuts = _CUTS.format(ends="finish_reason" if has_ends else "NULL")
        for table, sql in (("cuts", cuts), ("amounts", _REWARDS)):
            for row in store.execute(sql):
                yield table, tuple(row)


def _tokens(run: Run) -> Iterator[Row]:
    """Yield the texts of sampled tokens, if the store has their log-probabilities."""
    from leret.config.load import sampling_recipe_of
    from leret.policies.checkpoints import find_model

    ids = array("i")
    with closing(connect(run.store, read_only=True)) as store:
        if store.execute(_COLUMN, ("logprobs",)).fetchone():
            for [tokens] in store.execute(_TOKEN_IDS):
                ids.frombytes(tokens)
    if not ids or run.manifest.sampling is None:
        return
    policy = sampling_recipe_of(run).policy
    if policy.kind == "local":
        library = import_optional("tokenizers", "tokenizers", "train")
        tokenizer = library.Tokenizer.from_file(str(find_model(policy.model) / "tokenizer.json"))
        for token in set(ids):
            yield "tokens", (token, tokenizer.decode([token], skip_special_tokens=False))


if __name__ == "__main__":
    collect(Run.open(Path(sys.argv[1])), Path(sys.argv[2]))
