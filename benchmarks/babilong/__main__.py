"""Evaluate pickers as in Q-RAG: episode logs, several task lengths in one call, and answers by a reader LM.

    python -m benchmarks.babilong eval RUN [--recipe babilong] [--lengths 30 160 1200] [--set KEY=VALUE ...]
    python -m benchmarks.babilong answer LOG --policy READER [--task qa2] [--max-tokens 32]

``eval`` runs `leret eval` on a run of `babilong`, `qrag-hotpotqa` or another program that picks. It also writes the
logs of `episodes.py` next to each system's results, and sweep.json and sweep.svg for several ``--lengths`` (sentences
per task, kind babilong). ``answer`` reads one log, or all logs below a directory; see `answers.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.babilong.answers import MEASURES, answer, find_logs
from benchmarks.babilong.episodes import write_logs
from benchmarks.babilong.reader import ReaderLM
from benchmarks.babilong.sweep import sweep_table, write_sweep
from leret.cli import console
from leret.config.base import Settings
from leret.config.evaluation import EvalRecipe
from leret.config.load import load_recipe
from leret.config.policy import PolicySettings
from leret.core import yaml
from leret.core.progress import Progress, shown
from leret.core.runs import Run
from leret.evaluation.stage import EvalReport, evaluate
from leret.policies.load import make_policy, probe
from leret.viewer.report import write_report


def sweep(recipe: EvalRecipe, run: Run, lengths: list[int], progress: Progress) -> list[EvalReport]:
    """Evaluate a recipe at each length (once if there are no lengths), and write the logs and the sweep."""
    changes = [{"sentences": n} for n in lengths] or [{}]
    recipes = [recipe.model_copy(update={"data": recipe.data.model_copy(update=change)}) for change in changes]
    reports = []
    for each in recipes:
        reports.append(evaluate(each, run, progress=progress, report=write_report))
        write_logs(each, run)
    if len(lengths) > 1:
        with run.writing():
            write_sweep(run.eval / (recipe.evaluation or ""), [report.summary for report in reports])
    return reports


def evaluate_command(arguments: argparse.Namespace) -> None:
    run, recipe = Run.open(arguments.run), load_recipe(arguments.recipe, EvalRecipe, arguments.set)
    with shown() as progress:
        reports = sweep(recipe, run, arguments.lengths, progress)
    columns, rows = sweep_table([report.summary for report in reports])
    console.table(columns, rows, "by number of sentences per task")
    for report in reports:
        console.done(f"{report.path}  {report.page}")


def answer_command(arguments: argparse.Namespace) -> None:
    settings = reader_settings(arguments.policy)
    files = find_logs(arguments.log)

    async def answer_all() -> list[dict[str, Any]]:
        await probe(settings)
        reader = ReaderLM(make_policy(settings), arguments.task, arguments.max_tokens)
        try:
            with shown() as progress:
                return [await answer(file, reader, progress) for file in files]
        finally:
            await reader.policy.aclose()

    results = asyncio.run(answer_all())
    rows = [(r["log"], str(r["n"]), *("-" if r[n] is None else f"{r[n]:.3f}" for n in MEASURES)) for r in results]
    console.table(("log", "n", "answer EM", "answer F1", "fact EM", "fact F1"), rows)
    print(json.dumps({"logs": results}))


def reader_settings(text: str) -> PolicySettings:
    """Parse a model name, or a policy's settings as in a recipe: ``{kind: openai, urls: [...], model: M}``."""

    class Reader(Settings):
        policy: PolicySettings

    value = yaml.parse(text, "--policy").value if text.startswith("{") else {"model": text}
    return Reader.model_validate({"policy": value}).policy


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.babilong", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("eval")
    command.add_argument("run", type=Path)
    command.add_argument("--recipe", default="babilong")
    command.add_argument("--lengths", type=int, nargs="*", default=[])
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    command.set_defaults(call=evaluate_command)
    command = commands.add_parser("answer")
    command.add_argument("log", type=Path)
    command.add_argument("--policy", required=True)
    command.add_argument("--task")
    command.add_argument("--max-tokens", type=int, default=32)
    command.set_defaults(call=answer_command)
    parsed = parser.parse_args(arguments)
    parsed.call(parsed)


if __name__ == "__main__":
    main()
