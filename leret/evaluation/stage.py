"""`leret eval`: systems on held-out questions of a run's data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.evaluation import EvalRecipe
from leret.core.files import write_atomically
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.core.types import Task, digest
from leret.evaluation.evaluator import Evaluator
from leret.evaluation.held_out import held_out
from leret.evaluation.job import Job, finished, on_data, resolve
from leret.evaluation.policies import deliver, settings_of
from leret.evaluation.report.examples import examples
from leret.evaluation.report.page import write_page
from leret.evaluation.results import SystemResults
from leret.evaluation.runner import EvaluationSetup
from leret.evaluation.statistics import Statistics
from leret.evaluation.summary import Evaluated, summarise
from leret.evaluation.systems import System, focus
from leret.evaluation.trec import write_qrels, write_run
from leret.policies.load import probe
from leret.sampling.rollouts.environment import Environment, refuse_changed_files, refuse_changes


@dataclass(frozen=True)
class EvalReport:
    """What the stage did.

    Attributes:
        summary: content of summary.json.
        path: of that file, in R/eval or R/eval/NAME.
        page: R/report.html, or R/eval/NAME/report.html.
        asked: systems that anything was asked of in this call.
        already: everything was there, and nothing was done.
        seconds: wall clock of this call.
    """

    summary: Mapping[str, Any]
    path: Path
    page: Path
    asked: tuple[str, ...] = ()
    already: bool = False
    seconds: float = 0.0


def evaluate(recipe: EvalRecipe, run: Run, *, progress: Progress | None = None) -> EvalReport:
    """Evaluate systems, compare them, and write summary, TREC files, report and program.

    A system that is evaluated already under the same policy, prompt, data and settings is not asked again; questions
    that failed are. Ctrl-C keeps what is done.

    Args:
        recipe: what to evaluate.
        run: a sampled run; trained policies are optional.
        progress: hears of every question that ends.

    Raises:
        ConfigError: unknown systems, measures or baseline.
        DataError: a question of the evaluation was sampled in this run, or there is none.
        PolicyError, RetrievalError, ProgramError: more than half of a system's questions failed; what is done is kept.
        RunError: the run was not sampled, or cannot be read or written; or what is evaluated has changed.
    """
    began = time.monotonic()
    job = resolve(recipe, run)
    before = finished(job)
    if before is not None:
        return _report(job, before, began, already=True)
    with Environment.open(run) as bench:
        refuse_changed_files(run, bench)
        questions, data = held_out(recipe, run, bench)
        job = on_data(job, data)
        asked, kept = _evaluate(job, bench, questions, progress or Silent())
        summary = _summarise(job, questions, kept)
        shown = _examples(job, bench, questions, kept, summary["focus"])
        with run.writing():
            write_qrels(job.directory / "qrels.trec", questions)
            write_atomically(job.directory / "examples.json", json.dumps(shown, ensure_ascii=False, indent=1) + "\n")
            if job.delivers:
                deliver(run, bench, next((s for s in job.systems if s.name == summary["focus"]), None))
    run.update(eval=recipe.model_dump(mode="json"))
    write_page(run, job.page, summary, shown)
    with run.writing():  # last, since it says that all is there
        write_atomically(job.directory / "summary.json", json.dumps(summary, ensure_ascii=False, indent=1) + "\n")
    return _report(job, summary, began, asked=asked)


def open_evaluator(job: Job, bench: Environment, questions: Sequence[Task], progress: Progress) -> Evaluator:
    """The evaluator of a job.

    Args:
        job: resolved.
        bench: of the run.
        questions: as `held_out` gives them.
        progress: hears of every question that ends.

    Raises:
        LeretError: data, index or program cannot be opened, or the retriever is not the one that was sampled with.
    """
    recipe, policy, retriever = job.recipe, bench.recipe.policy, bench.recipe.retriever
    refuse_changes(job.run, bench.recipe, {"retriever": bench.retriever.digest})
    setting = EvaluationSetup(
        bench.replay,
        bench.formatter,
        bench.retriever,
        max_tokens=policy.max_tokens,
        temperature=recipe.temperature,
        top_p=policy.top_p,
        samples=recipe.samples if recipe.temperature > 0 else 1,
        seed=recipe.seed,
    )
    key = digest(
        [bench.corpus.digest, bench.retriever.digest, bench.program_digest, retriever.k, retriever.exclude_seen],
        job.measures,
        job.data,
    )
    return Evaluator(
        job.run,
        job.directory,
        setting,
        job.policies,
        questions=questions,
        corpus=bench.corpus,
        measures=job.measures,
        key=key,
        progress=progress,
    )


def _evaluate(
    job: Job, bench: Environment, questions: Sequence[Task], progress: Progress
) -> tuple[tuple[str, ...], dict[str, SystemResults]]:
    """Every system's rows, and the names of those that anything was asked of."""
    evaluator = open_evaluator(job, bench, questions, progress)
    asked, kept = [], {}
    try:
        base = bench.recipe.policy
        missing = [system for system in job.systems if system.prompt is not None and evaluator.missing(system)[1]]
        for settings in {settings_of(system, base) for system in missing}:
            asyncio.run(probe(settings))
        for system in job.systems:
            kept[system.name], new = evaluator.evaluate(system)
            if new:
                asked.append(system.name)
                _note(job, system, kept[system.name])
    finally:
        evaluator.close()
    return tuple(asked), kept


def _note(job: Job, system: System, kept: SystemResults) -> None:
    """The run file and the event of a system that has just been evaluated."""
    last = {row.question_id: row for row in kept.rows if row.sample == 0 and row.failure is None}
    with job.run.writing():
        write_run(
            job.directory / system.name / "run.trec",
            system.name,
            ((row.question_id, row.doc_ids, row.scores) for row in last.values()),
        )
    failed = sum(row.failure is not None for row in kept.rows)
    job.run.event(
        "eval",
        "evaluated",
        name=job.recipe.evaluation_name,
        system=system.name,
        seconds=round(kept.seconds, 3),
        failed=failed,
    )


def _summarise(job: Job, questions: Sequence[Task], kept: Mapping[str, SystemResults]) -> dict[str, Any]:
    recipe = job.recipe
    evaluated = [
        Evaluated(
            system=system.name,
            kind=system.kind,
            policy=system.policy,
            prompt=None if system.prompt is None else system.prompt.name,
            rows=kept[system.name].rows,
            seconds=kept[system.name].seconds,
            lm_calls=kept[system.name].lm_calls,
            rivals=system.rivals,
        )
        for system in job.systems
    ]
    statistics = Statistics(recipe.resamples, recipe.confidence, recipe.seed)
    return {
        **summarise(evaluated, questions, job.measures, recipe.baseline, statistics),
        "name": recipe.evaluation_name,
        "data": job.data,
        "focus": focus(job.systems),
        "split": recipe.split,
        "temperature": recipe.temperature,
        "samples": recipe.samples,
        "seed": recipe.seed,
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "key": job.key,
    }


def _examples(
    job: Job, bench: Environment, questions: Sequence[Task], kept: Mapping[str, SystemResults], name: str | None
) -> dict[str, Any] | None:
    rival = job.recipe.baseline
    if name is None or rival not in kept or rival == name:
        return None
    pair = [(system, kept[system].rows) for system in (name, rival)]
    return examples(pair[0], pair[1], questions, bench.corpus, job.recipe.examples)


def _report(
    job: Job, summary: Mapping[str, Any], began: float, *, asked: tuple[str, ...] = (), already: bool = False
) -> EvalReport:
    return EvalReport(summary, job.directory / "summary.json", job.page, asked, already, time.monotonic() - began)
