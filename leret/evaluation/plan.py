"""An evaluation before it runs: resolved from its recipe, its tasks, its evaluator, and what it would cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.base import free_keys
from leret.config.evaluation import EvalRecipe
from leret.config.load import sampling_recipe_of
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, RunError
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.core.stages import check_resumable, completed, input_stamps, stage_key
from leret.core.types import Task, digest
from leret.datasets.load import limited, split_name
from leret.datasets.splits import refuse_doubles, refuse_leak
from leret.evaluation.measures import all_measures
from leret.evaluation.runner import EvaluationSetup, Evaluator, Policies
from leret.evaluation.systems import BASE, System, available, select, training_facts
from leret.rewards.functions import sources_digest
from leret.rollouts.environment import (
    Environment,
    questions_digest,
    recipe_stamps,
    refuse_changed_files,
    refuse_changes,
)
from leret.rollouts.rollout import Decoding
from leret.sampling.estimate import steps_of
from leret.sampling.store.store import Store

_RENAME = "give this evaluation another name: --set evaluation=NAME"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, resolved from its recipe; nothing of it is opened yet.

    Attributes:
        sampling: the run's recipe.
        policies: of the run.
        measures: the recipe's, and those that every report shows.
        directory: of the results.
        key: names all that the summary follows from, files by their size and time of change.
    """

    recipe: EvalRecipe
    run: Run
    systems: Sequence[System]
    sampling: SamplingRecipe
    policies: Policies
    measures: Sequence[str]
    directory: Path
    key: str

    @property
    def sentences(self) -> int | None:
        """Of a task of kind babilong, where all have the same number."""
        lengths = self.recipe.data.sentences, self.sampling.data.sentences
        return next((n for n in lengths if isinstance(n, int)), None)

    @property
    def page(self) -> Path:
        return self.run.report if self.directory == self.run.eval else self.directory / "report.html"

    @property
    def delivers(self) -> bool:
        """Whether R/program is this one's: of the run's own test questions, or any while there is none of these."""
        return self.directory == self.run.eval or not (self.run.eval / "summary.json").is_file()

    def summary(self) -> dict[str, Any]:
        """summary.json as it is; nothing where it is not there, or cannot be read."""
        try:
            return dict(json.loads((self.directory / "summary.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def done(self) -> dict[str, Any] | None:
        """The summary, where all of this very evaluation is there and nothing failed."""
        delivered = not self.delivers or (self.run.program / "program.json").is_file()
        return self.summary() or None if delivered and completed(self.directory, "eval", self.key) is not None else None


@dataclass(frozen=True)
class EvalEstimate:
    """What is asked for, what is there (all of it where ``done``), and what the rest costs.

    ``steps`` are the LM calls of one run of the program, None where they cannot be told without an LM, or nothing is
    left to ask; ``lm_calls`` is an upper bound.
    """

    questions: int
    systems: tuple[str, ...]
    to_ask: tuple[str, ...]
    steps: int | None
    lm_calls: int | None
    done: bool


def estimate(recipe: EvalRecipe, run: Run) -> EvalEstimate:
    """What `leret.evaluation.stage.evaluate` would do; writes nothing, and fails like it where no policy is needed."""
    choice = choosing(resolve(recipe, run))
    parts = [_estimate(one, run) for one in (*recipe.each(), *([choice] if choice else []))]
    to_ask = tuple(dict.fromkeys(name for part in parts for name in part.to_ask))
    calls = [part.lm_calls for part in parts if part.lm_calls is not None]
    n_calls = sum(calls) if len(calls) == len(parts) else None
    n, done = sum(part.questions for part in parts), all(part.done for part in parts)
    return EvalEstimate(n, parts[0].systems, to_ask, parts[0].steps, n_calls, done)


def choosing(evaluation: Evaluation) -> EvalRecipe | None:
    """The evaluation on ``choose_on`` that chooses the policy to deliver; None if there is nothing to choose."""
    recipe = evaluation.recipe
    names = tuple(system.name for system in evaluation.systems if system.kind == "policy" and not system.control)
    if recipe.choose_on in (None, recipe.split) or len(names) < 2:
        return None
    changes: dict[str, Any] = {
        "split": recipe.choose_on,
        "systems": names,
        "choose_on": None,
        "demos": {},
        "actors": {},
    }
    return recipe.model_copy(update=changes)


def _estimate(recipe: EvalRecipe, run: Run) -> EvalEstimate:
    evaluation = resolve(recipe, run)
    names = tuple(system.name for system in evaluation.systems)
    before = evaluation.done()
    if before is not None:
        return EvalEstimate(before["n_questions"], names, (), None, 0, True)
    with Environment.open(run) as environment:
        tasks, data = held_out(evaluation, environment)
        steps = steps_of(environment)
        samples = recipe.samples if recipe.temperature > 0 else 1
        runs = {s.name: len(tasks) * (samples if s.prompt is not None else 1) for s in evaluation.systems}
        index = environment.recipe.retriever.index_directory(environment.cache)
        if index is None or index.is_dir():  # without one, nothing can have been evaluated over it
            evaluator = open_evaluator(evaluation, environment, tasks, data, Silent())
            runs = {s.name: sum(map(len, evaluator.missing(s)[1].values())) for s in evaluation.systems}
    n_calls = sum(runs[system.name] for system in evaluation.systems if system.prompt is not None)
    to_ask = tuple(name for name, n in runs.items() if n)
    return EvalEstimate(len(tasks), names, to_ask, steps, None if steps is None else steps * n_calls, done=False)


def resolve(recipe: EvalRecipe, run: Run) -> Evaluation:
    """Everything that can be known without opening data or models; unknown systems, measures, baseline are refused."""
    sampled = sampling_recipe_of(run)
    known = available(run, recipe.demos, recipe.actors)
    systems = select(recipe.systems, known, (*recipe.demos, *recipe.actors))
    if recipe.baseline not in known:
        raise ConfigError(f"baseline: {recipe.baseline!r} is not in this run; it has {', '.join(known)}")
    measures = all_measures(recipe.measures)
    directory = run.eval / (recipe.evaluation_name or "")
    names = [*known, *(system.name for system in systems)]
    shared = [name for name in names if name == recipe.evaluation_name or (directory / name / "summary.json").is_file()]
    if shared:
        raise ConfigError(f"evaluation: {shared[0]!r} is a system and an evaluation of this run; {_RENAME}")
    policies = Policies(sampled.policy, {**sampled.policies, **recipe.policies})
    rounds = run.manifest.rounds
    local = sampled.policy.kind == "local" and not recipe.policies and any(s.policy == BASE for s in systems)
    if local and rounds and policies.digest(known[BASE]) != rounds[0]["digest"]:
        changed = f"policy.model: {sampled.policy.model} is no longer the policy that {run.path} was sampled from"
        raise RunError(f"{changed}; put its files back, or sample a new run")
    key = stage_key(
        recipe,
        "a hop is a search",  # in older evaluations it was an LM call; they are refused when their rows are read
        run.section("sampling", "leret sample RECIPE"),
        run.manifest.digests,
        [[s.name, s.prompt and s.prompt.digest, s.prompt and policies.digest(s)] for s in systems],
        input_stamps(run.store, run.preferences / "train.parquet", recipe.questions),
        recipe_stamps(sampled),
        *filter(None, [sources_digest(measures)]),
    )
    return Evaluation(recipe, run, systems, sampled, policies, measures, directory, key)


def held_out(evaluation: Evaluation, environment: Environment) -> tuple[list[Task], str]:
    """The recipe's questions that have gold documents, and a digest of all of the split, whatever the limit is."""
    recipe, run, data = evaluation.recipe, evaluation.run, environment.recipe.data
    if recipe.questions is not None and data.kind == "world":
        raise ConfigError(
            f"questions: {recipe.questions!r} cannot be asked of a generated world, which brings its own; leave it out"
        )
    if recipe.changes and data.kind != "babilong":
        raise ConfigError(
            f"data: the run's data are of kind {data.kind}, and only babilong's can be changed; leave it out"
        )
    refuse_changed_files(run, environment)
    own = environment.tasks("all")
    if changes := recipe.changes | ({} if recipe.questions is None else {"questions": recipe.questions}):
        other = environment.recipe.model_copy(update={"data": data.model_copy(update=changes)})
        split = Environment(other, environment.cache).tasks(recipe.split)
    else:
        split = _of_split(own, recipe.split, data.seed)
    chosen = limited(split, recipe.limit, data.seed)
    tasks = [task for task in chosen if task.gold]
    if not tasks:
        what = recipe.questions or f"split {recipe.split} of the run's data"
        why = f"its {len(chosen)} questions have no gold documents" if chosen else "it has none"
        raise DataError(f"{what} has no question to evaluate on: {why}; name another split or another question file")
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            ids = store.question_ids()
        ids |= {id for facts in training_facts(run).values() for id in facts.get("validation") or ()}
        refuse_leak(ids, (task.id for task in tasks))
        refuse_doubles((task for task in own if task.id in ids), tasks)
    name = questions_digest(split)
    _refuse_others(evaluation, name)
    return tasks, name


def open_evaluator(
    evaluation: Evaluation, environment: Environment, tasks: Sequence[Task], data: str, progress: Progress
) -> Evaluator:
    """The evaluator of a run's program, retriever and policies, over what `held_out` gave."""
    recipe, policy, retriever = evaluation.recipe, environment.recipe.policy, environment.retriever
    refuse_changes(evaluation.run, environment.recipe, {"retriever": retriever.digest})
    limits = {name: one.max_tokens for name, one in evaluation.policies.others.items()}
    environment.check_policies(evaluation.policies.others)
    setup = EvaluationSetup(
        environment.replay,
        environment.formatter,
        retriever,
        environment.engine,
        Decoding(policy.max_tokens, recipe.temperature, policy.top_p, recipe.seed, limits),
        samples=recipe.samples if recipe.temperature > 0 else 1,
    )
    search = environment.recipe.retriever
    opened = [environment.corpus.digest, retriever.digest, environment.program_digest, search.k, search.exclude_seen]
    where, policies, measures = (evaluation.run, evaluation.directory), evaluation.policies, evaluation.measures
    key = digest(opened, measures, data, *filter(None, [sources_digest(measures)]))
    return Evaluator(*where, setup, policies, tasks, environment.corpus, measures, key, progress)


def _of_split(tasks: Sequence[Task], split: str | None, seed: int) -> list[Task]:
    return [task for task in tasks if split in (None, "all", split_name(task, seed))]


def _refuse_others(evaluation: Evaluation, data: str) -> None:
    """Refuse to mix results on other questions, or decoded otherwise, in one directory."""
    old, recipe = evaluation.summary(), evaluation.recipe
    if old:
        free = free_keys(EvalRecipe) | (set() if recipe.temperature > 0 else {"seed"})  # greedy runs need no seed
        keys = old.keys() & EvalRecipe.model_fields.keys() - {"data"}  # which names the questions there
        before = {**{key: old[key] for key in keys}, "digest": {"questions": old["data"]}}
        now = {**recipe.model_dump(mode="json", include=keys), "digest": {"questions": data}}
        check_resumable(evaluation.directory, before, now, free, _RENAME)
