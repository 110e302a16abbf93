"""Write logs of a program that picks: one JSON line per episode, in each system's ``eval_seed{S}_ns{N}.jsonl``.

``N`` is the number of sentences per babilong task; for other data the name has no ``_ns{N}``. A line has ``id``,
``question``, ``answer``, ``support`` (gold ids), ``picked`` (ids in order), ``q_values`` of the picks (null without a
picker), ``texts``, ``return`` (the final reward) and measures of the facts: ``f1``, ``em`` (exactly the gold facts) and
``gold_within`` (all gold facts are picked). early_stop.json in the same directory has the results of `early_stop`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from leret.config.evaluation import EvalRecipe
from leret.core.files import write_atomically
from leret.core.runs import Run
from leret.core.types import Document, Json, Outcome, Passage, Task
from leret.evaluation.plan import resolve
from leret.evaluation.results import ScoredHop, first_runs, read_rows
from leret.rewards import Scoring, scoring
from leret.rewards.ranking import all_found, fact_em, fact_f1
from leret.rollouts.environment import Environment

_N_THRESHOLDS = 20


def write_logs(recipe: EvalRecipe, run: Run) -> None:
    """Write the log and early_stop.json of each system in an evaluation."""
    evaluation = resolve(recipe, run)
    whole = scoring(evaluation.sampling.sampling.whole_reward)
    with Environment.open(run) as environment, run.writing():
        tasks = evaluation.questions(environment).tasks
        for system in evaluation.systems:
            directory = evaluation.directory / system.name
            rows = read_rows(directory / "per_question.parquet")
            path = directory / file_name(recipe.seed, evaluation.sentences)
            write_log(path, rows, tasks, environment.corpus, whole)
            write_atomically(directory / "early_stop.json", json.dumps(early_stop(rows, tasks)) + "\n")


def file_name(seed: int, sentences: int | None) -> str:
    """Return the file name of a system's log.

    >>> file_name(0, 160), file_name(1, None)
    ('eval_seed0_ns160.jsonl', 'eval_seed1.jsonl')
    """
    return f"eval_seed{seed}{'' if sentences is None else f'_ns{sentences}'}.jsonl"


def write_log(
    path: Path, rows: Iterable[ScoredHop], tasks: Sequence[Task], corpus: Mapping[str, Document], reward: Scoring
) -> None:
    """Write one line per task, from its first run, unless that run failed. ``reward`` is the run's reward."""
    runs = first_runs(rows)
    lines = [_line(task, runs[task.id], corpus, reward) for task in tasks if task.id in runs]
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line))


def _line(
    task: Task, rows: Sequence[ScoredHop], corpus: Mapping[str, Document], reward: Scoring
) -> dict[str, Json] | None:
    if rows[-1].failure is not None:
        return None
    picks = [row for row in rows if row.query is not None]
    ids = [str(row.query) for row in picks]
    texts = _texts(task, ids, corpus)
    ranking = tuple(Passage(id, "", text, 1 / rank) for rank, (id, text) in enumerate(zip(ids, texts, strict=True), 1))
    return {
        "id": task.id,
        "question": task.inputs.get("question", task.text),
        "answer": task.answers[0] if task.answers else None,
        **({"answers": list(task.answers)} if len(task.answers) > 1 else {}),
        "support": list(task.gold),
        "picked": ids,
        "q_values": [row.value for row in picks],
        "texts": texts,
        "return": reward(Outcome(task, ranking=ranking, n_steps=len(ids))),
        "f1": fact_f1(ids, task.gold),
        "em": fact_em(ids, task.gold),
        "gold_within": all_found(ids, task.gold),
    }


def _texts(task: Task, ids: Sequence[str], corpus: Mapping[str, Document]) -> list[str]:
    """Return the picks' titles and texts as a reader sees them, from the task's chunks or else the corpus."""
    texts = {id: _titled(corpus[id].text, corpus[id].title) for id in {*ids} if id in corpus}
    for i, chunk in enumerate(task.inputs.get("chunks", ())):
        if not isinstance(chunk, str):
            texts[str(chunk.get("id", i))] = _titled(**chunk)
        elif str(i) in ids:
            texts[str(i)] = chunk
    return [texts.get(id) or id for id in ids]


def _titled(text: str, title: str = "", **others: Json) -> str:
    return f"{title} | {text}" if title else text


def early_stop(rows: Iterable[ScoredHop], tasks: Sequence[Task]) -> list[dict[str, float]]:
    """Score the picks if picking stopped before the first Q-value below a threshold (but after one pick or more).

    Returns one point per threshold, at `_N_THRESHOLDS` quantiles of the Q-values: ``threshold``, ``picks`` (mean),
    ``fact_f1`` and ``all_found``. Returns no points if there are no Q-values.

    Source: Q-RAG (arXiv 2511.07328), stopping by the largest Q-value.
    """
    runs = first_runs(rows)
    episodes = [
        (task.gold, [(str(row.query), row.value) for row in runs[task.id] if row.query and row.value is not None])
        for task in tasks
        if task.id in runs
    ]
    values = [value for _, picks in episodes for _, value in picks]
    thresholds = np.unique(np.quantile(values, np.linspace(0, 1, _N_THRESHOLDS))) if values else ()
    points = []
    for threshold in map(float, thresholds):
        cuts = [(gold, _until(picks, threshold)) for gold, picks in episodes if picks]
        means = {
            "picks": np.mean([len(ids) for _, ids in cuts]),
            "fact_f1": np.mean([fact_f1(ids, gold) for gold, ids in cuts]),
            "all_found": np.mean([all_found(ids, gold) for gold, ids in cuts]),
        }
        points.append({"threshold": threshold, **{name: float(mean) for name, mean in means.items()}})
    return points


def _until(picks: Sequence[tuple[str, float]], threshold: float) -> list[str]:
    end = next((i for i, (_, value) in enumerate(picks) if i and value < threshold), len(picks))
    return [id for id, _ in picks[:end]]
