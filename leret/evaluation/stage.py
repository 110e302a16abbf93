"""`leret eval`: evaluate systems on held-out questions of a run's data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.evaluation import EvalRecipe, main_measure
from leret.config.policy import PolicySettings
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import mark_completed
from leret.core.types import Task
from leret.evaluation.baselines import hyde_note
from leret.evaluation.measures import label_notes
from leret.evaluation.plan import Evaluation, choosing, open_evaluator, resolve
from leret.evaluation.questions import Questions, check_leaks
from leret.evaluation.results import (
    SystemResults,
    gold_scores,
    write_answers,
    write_qrels,
    write_run,
)
from leret.evaluation.runner import Evaluator
from leret.evaluation.summary import Summary, summarise
from leret.evaluation.systems import HYDE, OracleTitles, System, focus
from leret.policies.load import probe
from leret.policies.local.chat_template import dated
from leret.programs.saved import save
from leret.rollouts.environment import Environment

WriteReport = Callable[[Run, str | None], Path]
"""Writes the report of a run's evaluation, by its name; None is the main one."""


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation.

    ``asked`` names the systems run by this call, none if it was ``already`` complete.
    """

    summary: Summary
    path: Path
    page: Path
    asked: tuple[str, ...] = ()
    already: bool = False


def evaluate(
    recipe: EvalRecipe,
    run: Run,
    *,
    progress: Progress | None = None,
    report: WriteReport | None = None,
) -> EvalReport:
    """Evaluate systems, compare them, and write summary, TREC files, report and program.

    Stored results for the same policy, prompt, data and settings are reused; failed questions run
    again. After Ctrl-C, repeat the call to continue. ``report`` writes the report from the other
    files; None: no report.

    Raises:
        ConfigError: unknown systems, measures or baseline.
        DataError: an evaluation question was used for sampling in this run, or there are no
            questions.
        PolicyError, RetrievalError, ProgramError: more than half of a system's runs failed;
            finished runs are stored.
        RunError: the run was not sampled, cannot be read or written, or its inputs have changed.
    """
    evaluation = resolve(recipe, run)
    path = evaluation.directory / "summary.json"
    page = evaluation.page
    before = evaluation.done()
    if before is not None:
        if report is not None and not page.is_file():
            report(run, recipe.evaluation_name)
        return EvalReport(before, path, page, already=True)
    values = _chosen_on(evaluation, progress, report)
    with dated(run.manifest.date), Environment.open(run) as environment:
        questions = evaluation.questions(environment)
        evaluator = open_evaluator(evaluation, environment, questions, progress or Progress())
        asked, results = _evaluate_systems(evaluation, evaluator)
        summary = _summary(evaluation, questions, results)
        _set_focus(summary, evaluation, values)
        with run.writing():
            write_qrels(evaluation.directory / "qrels.trec", questions.tasks)
            if evaluation.delivers:
                systems = {system.name: system for system in evaluation.systems}
                hero = systems.get(summary["focus"])
                _deliver(run, environment, evaluation.policies.settings(hero))
    run.update(eval=recipe.model_dump(mode="json"))
    with run.writing():
        _write_json(path, summary)
        _mark(evaluation, summary)
    if report is not None:
        report(run, recipe.evaluation_name)
    return EvalReport(summary, path, page, asked)


def _chosen_on(
    evaluation: Evaluation, progress: Progress | None, report: WriteReport | None
) -> dict[str, float]:
    """Evaluate the policies on the split that chooses one of them.

    Returns their values, none if there is no choice.
    """
    recipe = choosing(evaluation)
    if recipe is None:
        return {}
    on_split = evaluate(recipe, evaluation.run, progress=progress, report=report)
    return _values(on_split.summary)


def _set_focus(summary: dict[str, Any], evaluation: Evaluation, values: dict[str, float]) -> None:
    """Set ``focus`` and, if it was chosen by a measure, ``chosen_on`` (value by policy)."""
    if evaluation.recipe.choose_on == evaluation.recipe.split:
        values = _values(summary)
    summary["focus"] = focus(evaluation.systems, values)
    if values:
        summary["chosen_on"] = values


def _values(summary: Summary) -> dict[str, float]:
    """Return the main measure of each policy, to choose the policy to deliver."""
    measure = main_measure(summary["measures"])
    policies = [row for row in summary["rows"] if row["kind"] == "policy"]
    return {row["system"]: row["hops"][-1][measure] or 0.0 for row in policies}


def _evaluate_systems(
    evaluation: Evaluation, evaluator: Evaluator
) -> tuple[tuple[str, ...], dict[str, SystemResults]]:
    """Evaluate all systems and close the evaluator.

    Returns the names of the systems that were run, and all results.
    """
    asked = []
    results = {}
    try:
        for policy in _policies_in_use(evaluation, evaluator):
            asyncio.run(probe(policy))
        for system in evaluation.systems:
            results[system.name], new = evaluator.evaluate(system)
            if new:
                asked.append(system.name)
                _record(evaluation, system, results[system.name], evaluator.questions)
    finally:
        evaluator.close()
    return tuple(asked), results


def _policies_in_use(evaluation: Evaluation, evaluator: Evaluator) -> set[PolicySettings]:
    """Return the policies, and the reader, of systems with questions to run."""
    policies: set[PolicySettings] = set()
    for system in evaluation.systems:
        _, todo = evaluator.missing(system)
        if todo and system.prompt is not None:
            policies.update(evaluation.policies.settings(system).values())
        if todo and evaluation.recipe.reader:
            policies.add(evaluation.recipe.reader.policy)
    return policies


def _record(
    evaluation: Evaluation, system: System, results: SystemResults, questions: Sequence[Task]
) -> None:
    """Write a system's run.trec and answers.jsonl, and log an event."""
    tasks = {task.id: task for task in questions}
    rankings = {}
    for row in results.rows:
        if row.sample == 0 and row.failure is None:
            task = tasks[row.question_id]
            rankings[task.id] = gold_scores(task, row.doc_ids, row.scores)
    with evaluation.run.writing():
        directory = evaluation.directory / system.name
        write_run(directory / "run.trec", system.name, rankings.items())
        write_answers(directory / "answers.jsonl", tasks, results.rows)
    evaluation.run.event(
        "eval",
        "evaluated",
        name=evaluation.recipe.evaluation_name,
        system=system.name,
        seconds=round(results.seconds, 3),
        failed=sum(row.failure is not None for row in results.rows),
    )


def _summary(
    evaluation: Evaluation, questions: Questions, results: Mapping[str, SystemResults]
) -> dict[str, Any]:
    recipe = evaluation.recipe
    evaluated = []
    left_out = []
    for system in evaluation.systems:
        if _is_no_bound(system, questions, results[system.name]):
            left_out.append(system.name)
        else:
            evaluated.append((system, results[system.name]))
    summary = summarise(evaluated, questions.tasks, list(evaluation.measures), recipe)
    gold = questions.gold.values()
    reader = None if recipe.reader is None else recipe.reader.policy
    leaks = check_leaks(questions, evaluation.run, evaluation.systems, evaluation.policies, reader)
    return {
        **summary,
        **recipe.model_dump(include={"split", "temperature", "samples", "seed"}),
        "name": recipe.evaluation_name,
        "sentences": evaluation.sentences,
        "data": questions.digest,
        "leaks": leaks,
        "gold_coverage": sum(gold) / len(gold) if gold else None,
        "reader": evaluation.reader,
        "notes": _notes(evaluation, questions, results, left_out),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "key": evaluation.key,
    }


def _notes(
    evaluation: Evaluation,
    questions: Questions,
    results: Mapping[str, SystemResults],
    left_out: Sequence[str],
) -> list[str]:
    """Return the notes of the report on data, answers, measures and systems."""
    notes = list(questions.notes)
    if evaluation.reader:
        notes.append(f"the reader {evaluation.reader['model']} wrote all answers")
    if HYDE in results:
        notes.append(hyde_note("the base policy", results[HYDE].rows))
    notes += label_notes(evaluation.recipe.specs, questions.tasks)
    for name in left_out:
        notes.append(
            f"{name} is left out: it picks gold documents, "
            "but this program's picks are not documents"
        )
    n_absent = list(questions.gold.values()).count(False)
    if n_absent:
        notes.append(f"the corpus lacks {n_absent:,} of {len(questions.gold):,} gold documents")
    return notes


def _is_no_bound(system: System, questions: Questions, results: SystemResults) -> bool:
    """Return True for an oracle that picked candidates, but never a gold document."""
    if not isinstance(system, OracleTitles):
        return False
    gold = {task.id: task.gold for task in questions.tasks}
    has_picks = False
    for row in results.rows:
        for id in row.picked:
            if id in gold[row.question_id]:
                return False
            has_picks = True
    return has_picks


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


def _mark(evaluation: Evaluation, summary: Summary) -> None:
    """Mark the evaluation as complete, unless questions failed."""
    key = evaluation.key
    if any(row["failed"] for row in summary["rows"]):
        key = ""
    directory = evaluation.directory
    files = [directory / "summary.json", directory / "qrels.trec"]
    for system in evaluation.systems:
        files.append(directory / system.name / "evaluated.json")
        files.append(directory / system.name / "per_question.parquet")
    # without the page: `leret view --report` writes it again
    mark_completed(directory, "eval", key, {}, files)


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
