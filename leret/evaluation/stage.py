"""`leret eval`: evaluate systems on held-out questions of a run's data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.evaluation import EvalRecipe
from leret.config.policy import PolicySettings
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import mark_completed
from leret.core.types import Task
from leret.evaluation.baselines import hyde_note
from leret.evaluation.measures import label_notes
from leret.evaluation.plan import (
    Evaluation,
    Questions,
    check_leaks,
    choosing,
    held_out,
    open_evaluator,
    resolve,
)
from leret.evaluation.report.content import examples
from leret.evaluation.report.page import Trees, write_page
from leret.evaluation.results import (
    SystemResults,
    gold_scores,
    write_answers,
    write_qrels,
    write_run,
)
from leret.evaluation.runner import Evaluator
from leret.evaluation.summary import main_measure, summarise
from leret.evaluation.systems import HYDE, ORACLE, System, focus
from leret.policies.load import probe
from leret.policies.local.chat_template import dated
from leret.programs.saved import save
from leret.rollouts.environment import Environment


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation. ``asked`` names the systems run by this call, none if it was ``already`` complete."""

    summary: Mapping[str, Any]
    path: Path
    page: Path
    asked: tuple[str, ...] = ()
    already: bool = False
    seconds: float = 0.0


def evaluate(
    recipe: EvalRecipe, run: Run, *, progress: Progress | None = None, trees: Trees | None = None
) -> EvalReport:
    """Evaluate systems, compare them, and write summary, TREC files, report and program.

    Stored results for the same policy, prompt, data and settings are reused; failed questions run again. After Ctrl-C,
    repeat the call to continue. ``trees`` writes the report's section on single questions.

    Raises:
        ConfigError: unknown systems, measures or baseline.
        DataError: an evaluation question was used for sampling in this run, or there are no questions.
        PolicyError, RetrievalError, ProgramError: more than half of a system's runs failed; finished runs are stored.
        RunError: the run was not sampled, cannot be read or written, or its inputs have changed.
    """
    began = time.monotonic()
    evaluation = resolve(recipe, run)
    path, page = evaluation.directory / "summary.json", evaluation.page
    if (before := evaluation.done()) is not None:
        return EvalReport(before, path, page, already=True, seconds=time.monotonic() - began)
    values = _chosen_on(evaluation, progress)
    with dated(run.manifest.date), Environment.open(run) as environment:
        questions = held_out(evaluation, environment)
        evaluator = open_evaluator(evaluation, environment, questions, progress or Progress())
        asked, results = _evaluate_systems(evaluation, evaluator)
        summary = _with_focus(_summary(evaluation, questions, results), evaluation, values)
        measure = "ap" if "ap" in summary["measures"] else main_measure(summary["measures"])
        shown = _examples(
            evaluation, environment, questions.tasks, results, summary["focus"], measure
        )
        with run.writing():
            write_qrels(evaluation.directory / "qrels.trec", questions.tasks)
            _write_json(evaluation.directory / "examples.json", shown)
            if evaluation.delivers:
                hero = next(
                    (system for system in evaluation.systems if system.name == summary["focus"]),
                    None,
                )
                _deliver(run, environment, evaluation.policies.settings(hero))
    run.update(eval=recipe.model_dump(mode="json"))
    with run.writing():
        _write_json(path, summary)
        write_page(run, page, summary, shown, trees)  # reads the summary
        _mark(evaluation, summary)
    return EvalReport(summary, path, page, asked, seconds=time.monotonic() - began)


def _chosen_on(evaluation: Evaluation, progress: Progress | None) -> dict[str, float]:
    """Evaluate the policies on the split that chooses one of them; return their values, none if there is no choice."""
    recipe = choosing(evaluation)
    if recipe is None:
        return {}
    return _values(evaluate(recipe, evaluation.run, progress=progress).summary)


def _with_focus(
    summary: dict[str, Any], evaluation: Evaluation, values: dict[str, float]
) -> dict[str, Any]:
    """Add ``focus`` (the policy to deliver) and, if it was chosen by a measure, ``chosen_on`` (value by policy)."""
    if evaluation.recipe.choose_on == evaluation.recipe.split:
        values = _values(summary)
    summary["focus"] = focus(evaluation.systems, values)
    if values:
        summary["chosen_on"] = values
    return summary


def _values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the main measure of each policy, to choose the policy to deliver."""
    measure = main_measure(summary["measures"])
    policies = [row for row in summary["rows"] if row["kind"] == "policy"]
    return {row["system"]: row["hops"][-1][measure] or 0.0 for row in policies}


def _evaluate_systems(
    evaluation: Evaluation, evaluator: Evaluator
) -> tuple[tuple[str, ...], dict[str, SystemResults]]:
    """Evaluate all systems and close the evaluator; return the names of the systems that were run, and all results."""
    asked, results = [], {}
    try:
        incomplete = [
            s for s in evaluation.systems if s.prompt is not None and evaluator.missing(s)[1]
        ]
        used = {
            policy
            for system in incomplete
            for policy in evaluation.policies.settings(system).values()
        }
        if evaluation.recipe.reader and any(
            evaluator.missing(system)[1] for system in evaluation.systems
        ):
            used.add(evaluation.recipe.reader.policy)
        for policy in used:
            asyncio.run(probe(policy))
        for system in evaluation.systems:
            results[system.name], new = evaluator.evaluate(system)
            if new:
                asked.append(system.name)
                _record(evaluation, system, results[system.name], evaluator.questions)
    finally:
        evaluator.close()
    return tuple(asked), results


def _record(
    evaluation: Evaluation, system: System, results: SystemResults, questions: Sequence[Task]
) -> None:
    """Write a system's run.trec and answers.jsonl, and log an event."""
    last = {row.question_id: row for row in results.rows if row.sample == 0 and row.failure is None}
    tasks = {task.id: task for task in questions}
    with evaluation.run.writing():
        rankings = (
            (id, gold_scores(tasks[id], row.doc_ids, row.scores)) for id, row in last.items()
        )
        directory = evaluation.directory / system.name
        write_run(directory / "run.trec", system.name, rankings)
        write_answers(directory / "answers.jsonl", tasks, results.rows)
    facts = {
        "seconds": round(results.seconds, 3),
        "failed": sum(row.failure is not None for row in results.rows),
    }
    name = evaluation.recipe.evaluation_name
    evaluation.run.event("eval", "evaluated", name=name, system=system.name, **facts)


def _summary(
    evaluation: Evaluation, questions: Questions, results: Mapping[str, SystemResults]
) -> dict[str, Any]:
    recipe, tasks, gold = evaluation.recipe, questions.tasks, list(questions.gold.values())
    evaluated = [(system, results[system.name]) for system in evaluation.systems]
    left_out = [system.name for system, rows in evaluated if _is_no_bound(system, questions, rows)]
    evaluated = [(system, rows) for system, rows in evaluated if system.name not in left_out]
    summary = summarise(evaluated, tasks, list(evaluation.measures), recipe)
    return {
        **summary,
        **recipe.model_dump(include={"split", "temperature", "samples", "seed"}),
        "name": recipe.evaluation_name,
        "sentences": evaluation.sentences,
        "data": questions.digest,
        "leaks": check_leaks(evaluation, questions),
        "gold_coverage": sum(gold) / len(gold) if gold else None,
        "reader": evaluation.reader,
        "notes": [
            *questions.notes,
            *(
                f"the reader {one['model']} wrote all answers"
                for one in filter(None, [evaluation.reader])
            ),
            *(
                hyde_note("the base policy", rows.rows)
                for name, rows in results.items()
                if name == HYDE
            ),
            *label_notes(recipe.specs, tasks),
            *(
                f"{name} is left out: it picks gold documents, but this program's picks are not documents"
                for name in left_out
            ),
            *[f"the corpus lacks {gold.count(False):,} of {len(gold):,} gold documents"]
            * (False in gold),
        ],
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "key": evaluation.key,
    }


def _is_no_bound(system: System, questions: Questions, results: SystemResults) -> bool:
    """Return True for an oracle that picked candidates, but never a gold document."""
    gold = {task.id: task.gold for task in questions.tasks}
    picks = [id in gold[row.question_id] for row in results.rows for id in row.picked]
    return system.method == ORACLE and bool(picks) and not any(picks)


def _examples(
    evaluation: Evaluation,
    environment: Environment,
    tasks: Sequence[Task],
    results: Mapping[str, SystemResults],
    name: str | None,
    measure: str,
) -> dict[str, Any] | None:
    rival = evaluation.recipe.baseline
    if name is None or rival not in results or rival == name:
        return None
    ours, theirs = ((system, results[system].rows) for system in (name, rival))
    return examples(ours, theirs, tasks, environment.corpus, evaluation.recipe.examples, measure)


def _deliver(run: Run, environment: Environment, policies: Mapping[str, PolicySettings]) -> None:
    """Write R/program for `leret.load`."""
    settings = environment.recipe.retriever
    index = settings.index_directory(environment.cache)
    if index:
        settings = settings.model_copy(update={"index": str(index.resolve())})
    save(
        environment.program(),
        run.program,
        adapter=environment.adapter,
        source=environment.source,
        policies=policies,
        retriever=settings,
        data=environment.recipe.data,
    )


def _mark(evaluation: Evaluation, summary: Mapping[str, Any]) -> None:
    """Mark the evaluation as complete, unless questions failed."""
    key = "" if any(row["failed"] for row in summary["rows"]) else evaluation.key
    names = [
        f"{s.name}/{file}"
        for s in evaluation.systems
        for file in ("evaluated.json", "per_question.parquet")
    ]
    files = (evaluation.directory / name for name in ("summary.json", "qrels.trec", *names))
    mark_completed(
        evaluation.directory, "eval", key, {}, files
    )  # not the page: `leret report` writes it again


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
