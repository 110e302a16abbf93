"""Preparation of an evaluation: resolve its recipe, load its tasks, open its evaluator, and estimate its cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leret.config.base import free_keys, paths_in
from leret.config.data import GENERATED
from leret.config.evaluation import EvalRecipe, ReaderSettings
from leret.config.load import sampling_recipe_of
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import check_resumable, completed, input_stamps, stage_key
from leret.core.types import Task, digest
from leret.datasets.leaks import FINGERPRINTS, find_leaks, refuse_leaks
from leret.datasets.load import limited, split_name
from leret.evaluation.measures import Measures, all_measures, scorable, scores_search
from leret.evaluation.runner import Evaluator, Policies
from leret.evaluation.systems import BASE, ORACLE, System, available, select, training_facts
from leret.policies.checkpoints import policy_directory
from leret.policies.load import compute_digest
from leret.programs.prompts import ZERO_SHOT
from leret.rewards import function_names
from leret.rewards.functions import sources_digest
from leret.rollouts.actors import Decoding
from leret.rollouts.environment import (
    Environment,
    questions_digest,
    recipe_files,
    refuse_changed_files,
    refuse_changes,
)
from leret.sampling.estimate import steps_of
from leret.sampling.store.store import Store

_RENAME = "choose a new name for this evaluation: --set evaluation=NAME"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, resolved from its recipe before data and models are loaded.

    ``key`` is a digest of all inputs of the summary. Files enter the digest by size and modification time.
    """

    recipe: EvalRecipe
    run: Run
    systems: Sequence[System]
    sampling: SamplingRecipe
    policies: Policies
    measures: Measures
    directory: Path
    key: str
    reader: Mapping[str, Any] | None  # model, digest and settings of the recipe's reader

    @property
    def sentences(self) -> int | None:
        """Number of sentences per task (babilong only); None if the number differs between tasks."""
        lengths = self.recipe.data.sentences, getattr(self.sampling.data, "sentences", None)
        return next((n for n in lengths if isinstance(n, int)), None)

    @property
    def samples(self) -> int:
        """Runs per question for systems with an LM; 1 at temperature 0, because repeated runs would be identical."""
        return self.recipe.samples if self.recipe.temperature > 0 else 1

    @property
    def page(self) -> Path:
        return (
            self.run.report if self.directory == self.run.eval else self.directory / "report.html"
        )

    @property
    def delivers(self) -> bool:
        """Return whether to write R/program; a named evaluation does so only if no unnamed one has a summary."""
        return self.directory == self.run.eval or not (self.run.eval / "summary.json").is_file()

    def summary(self) -> dict[str, Any]:
        """Read summary.json; return an empty dict if the file is missing or unreadable."""
        try:
            return dict(json.loads((self.directory / "summary.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def done(self) -> dict[str, Any] | None:
        """Return the summary if this evaluation is complete and no question failed, else None."""
        written = self.page.is_file() and (
            not self.delivers or (self.run.program / "program.json").is_file()
        )
        return (
            self.summary() or None
            if written and completed(self.directory, "eval", self.key) is not None
            else None
        )


@dataclass(frozen=True)
class EvalEstimate:
    """Estimated cost of an evaluation, for `--dry-run`."""

    questions: int
    systems: tuple[str, ...]
    to_ask: tuple[str, ...]  # systems that still have questions to run
    steps: (
        int | None
    )  # LM calls per run of the program; None if this depends on the LM, or if no results are missing
    lm_calls: int | None  # upper bound for all missing questions; None if ``steps`` is unknown
    done: bool


def estimate(recipe: EvalRecipe, run: Run) -> EvalEstimate:
    """Estimate the cost of `leret.evaluation.stage.evaluate`, and raise the same errors except policy errors."""
    whole = _estimate(recipe, run)
    choice = choosing(resolve(recipe, run))
    if choice is None:
        return whole
    part = _estimate(choice, run)
    to_ask = tuple(dict.fromkeys((*whole.to_ask, *part.to_ask)))
    n_calls = (
        None if whole.lm_calls is None or part.lm_calls is None else whole.lm_calls + part.lm_calls
    )
    n_questions, done = whole.questions + part.questions, whole.done and part.done
    return EvalEstimate(n_questions, whole.systems, to_ask, whole.steps, n_calls, done)


def choosing(evaluation: Evaluation) -> EvalRecipe | None:
    """Return the recipe for evaluating the policies on the split ``choose_on``; None if there is no choice to make."""
    recipe = evaluation.recipe
    policies = [
        system
        for system in evaluation.systems
        if system.kind == "policy" and system.retriever is None
    ]
    names = tuple(system.name for system in policies if not system.control)
    if recipe.choose_on in (None, recipe.split) or len(names) < 2:
        return None
    name = recipe.evaluation and f"{recipe.evaluation}-{recipe.choose_on}"
    alone: dict[str, Any] = {"evaluation": name, "demos": {}, "actors": {}, "retrievers": {}}
    return recipe.model_copy(update={**alone, "split": recipe.choose_on, "systems": names})


def _estimate(recipe: EvalRecipe, run: Run) -> EvalEstimate:
    evaluation = resolve(recipe, run)
    names = tuple(system.name for system in evaluation.systems)
    before = evaluation.done()
    if before is not None:
        return EvalEstimate(before["n_questions"], names, (), None, 0, True)
    with Environment.open(run) as environment:
        questions = held_out(evaluation, environment)
        tasks = questions.tasks
        steps = steps_of(environment)
        runs = {
            s.name: len(tasks) * (evaluation.samples if s.prompt is not None else 1)
            for s in evaluation.systems
        }
        if _has_index(environment):  # without an index, no results are stored yet
            evaluator = open_evaluator(evaluation, environment, questions, Progress())
            built = {None, *(name for name, other in evaluator.others.items() if _has_index(other))}
            known = [system for system in evaluation.systems if system.retriever in built]
            runs |= {
                system.name: sum(map(len, evaluator.missing(system)[1].values()))
                for system in known
            }
    n_runs = sum(runs[system.name] for system in evaluation.systems if system.prompt is not None)
    n_calls = (
        None if steps is None else steps * n_runs + (sum(runs.values()) if recipe.reader else 0)
    )
    to_ask = tuple(name for name, n in runs.items() if n)
    return EvalEstimate(len(tasks), names, to_ask, steps, n_calls, done=False)


def _has_index(environment: Environment) -> bool:
    index = environment.recipe.retriever.index_directory(environment.cache)
    return index is None or index.is_dir()


def resolve(recipe: EvalRecipe, run: Run) -> Evaluation:
    """Resolve a recipe without loading data or models; ConfigError for unknown systems, measures or baseline."""
    sampled = sampling_recipe_of(run)
    known = available(run, recipe.demos, recipe.actors, recipe.retrievers)
    systems = select(recipe.systems, known, (*recipe.demos, *recipe.actors))
    if recipe.baseline not in known:
        raise ConfigError(
            f"baseline: unknown system {recipe.baseline!r}; available: {', '.join(known)}"
        )
    measures = all_measures(recipe.specs)
    directory = run.eval / (recipe.evaluation_name or "")
    names = [*known, *(system.name for system in systems)]
    shared = [
        name
        for name in names
        if name == recipe.evaluation_name or (directory / name / "summary.json").is_file()
    ]
    if shared:
        raise ConfigError(
            f"evaluation: {shared[0]!r} names both a system and an evaluation; {_RENAME}"
        )
    policies = Policies(sampled.policy, {**sampled.policies, **recipe.policies})
    rounds = run.manifest.rounds
    local = (
        sampled.policy.kind == "local"
        and not recipe.policies
        and any(s.policy == BASE for s in systems)
    )
    if local and rounds and policies.digest(known[BASE]) != rounds[0]["digest"]:
        raise RunError(
            f"policy.model: {sampled.policy.model} has changed since {run.path} was sampled; restore the "
            "model's files, or sample a new run"
        )
    others = recipe.retrievers.values()
    reader = None if recipe.reader is None else _reader_facts(recipe.reader)
    key = stage_key(
        recipe,
        "a hop is a search",  # in older evaluations, a hop was an LM call
        run.section("sampling", "leret sample RECIPE"),
        run.manifest.digests,
        [[s.name, s.prompt and s.prompt.digest, s.prompt and policies.digest(s)] for s in systems],
        input_stamps(run.store, run.preferences / "train.parquet", recipe.questions),
        input_stamps(*recipe_files(sampled)),
        [
            input_stamps(*(path for _, path, mark in paths_in(one) if not mark.may_be_missing))
            for one in others
        ],
        *filter(None, [sources_digest(_functions(measures)), reader]),
    )
    return Evaluation(recipe, run, systems, sampled, policies, measures, directory, key, reader)


def _reader_facts(reader: ReaderSettings) -> dict[str, Any]:
    policy = reader.policy.model_dump(include={"max_tokens", "enable_thinking", "template"})
    facts = {"model": Path(reader.policy.model).name, "digest": compute_digest(reader.policy)}
    return {**facts, **policy, **reader.model_dump(exclude={"policy"})}


@dataclass(frozen=True)
class Questions:
    """Questions to evaluate (``tasks``)."""

    tasks: Sequence[Task]
    trained: Sequence[Task]  # the run's questions that training has seen
    digest: str  # of all questions of the split
    gold: Mapping[
        str, bool
    ]  # gold documents of the data: True if in the corpus; empty if this is unknown
    notes: Sequence[str]  # on skipped and doubtful records


def held_out(evaluation: Evaluation, environment: Environment) -> Questions:
    """Return the recipe's questions to which a requested measure applies.

    DataError if there are none; ConfigError for systems that only search, if no measure applies to the documents found.
    """
    recipe, run, data = evaluation.recipe, evaluation.run, environment.recipe.data
    if recipe.questions is not None and data.kind in GENERATED:
        raise ConfigError(
            f"questions: {recipe.questions!r} does not apply to a generated world; remove the key"
        )
    if recipe.changes and data.kind != "babilong":
        raise ConfigError(
            f"data: only babilong data can be changed, but the run has {data.kind} data; remove the key"
        )
    refuse_changed_files(run, environment)
    run_tasks = environment.tasks("all")
    if changes := recipe.changes | (
        {} if recipe.questions is None else {"questions": recipe.questions}
    ):
        other = environment.recipe.model_copy(update={"data": data.model_copy(update=changes)})
        source = Environment(other, environment.cache)
        split = source.tasks(recipe.split)
    else:
        source = environment
        split = [t for t in run_tasks if recipe.split in ("all", split_name(t, data.seed))]
    chosen = limited(split, recipe.limit, data.seed)
    tasks = scorable(recipe.specs, chosen)
    if not tasks:
        place = recipe.questions or f"split {recipe.split} of the run's data"
        none = f"none of its {len(chosen)} questions has labels for {', '.join(recipe.specs)}"
        raise DataError(
            f"no questions to evaluate in {place} ({none if chosen else 'it is empty'}); choose other measures, "
            "another split or question file: rankings are measured by gold documents, and answers by reference "
            "answers (measures: [f1])"
        )
    _refuse_search_alone(evaluation, tasks)
    trained = trained_tasks(run, environment, run_tasks)
    refuse_leaks(trained, tasks)
    data_digest = questions_digest(split)
    _refuse_other_results(evaluation, data_digest)
    return Questions(tasks, trained, data_digest, source.gold, source.data_notes())


def trained_tasks(run: Run, environment: Environment, tasks: Sequence[Task]) -> list[Task]:
    """Return those of a run's tasks that were sampled, trained on, or used for validation."""
    data, ids = environment.recipe.data, set[str]()
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            ids |= store.question_ids()
    for facts in training_facts(run).values():
        ids.update(facts.get("validation") or ())
        recipe = (facts.get("key") or {}).get("recipe") or {}
        if "limit" in recipe:  # online training also uses questions that are not in the store
            split = (task for task in tasks if data.split in ("all", split_name(task, data.seed)))
            chosen = limited(split, recipe["limit"] or data.limit, data.seed, data.part)
            ids |= {task.id for task in chosen} - environment.held_out
    return [task for task in tasks if task.id in ids]


def check_leaks(evaluation: Evaluation, questions: Questions) -> dict[str, Any]:
    """Compare the questions with all texts that the systems have learned from, as far as these are recorded."""
    run, training, pretrained, unknown = (
        evaluation.run,
        list(questions.trained),
        set[str](),
        dict[str, None](),
    )
    readers = filter(None, [evaluation.recipe.reader])
    runs, models = {run.path.resolve()}, [reader.policy for reader in readers]
    for system in evaluation.systems:
        if system.prompt is None:
            continue
        models += [evaluation.policies.base, *evaluation.policies.settings(system).values()]
        demos = (demo for some in system.prompt.demos.values() for demo in some)
        inputs = [{name: demo.get(name) for name in questions.tasks[0].inputs} for demo in demos]
        training += [
            Task(f"a demo of {system.name}", one) for one in inputs if None not in one.values()
        ]
    for settings in (one for one in models if one.model != "scratch"):  # grows during the loop
        path = (policy_directory(settings.model) or Path(settings.model)).resolve()
        home = next((parent for parent in path.parents if (parent / "run.yaml").is_file()), None)
        if (path / FINGERPRINTS).is_file():
            pretrained.update((path / FINGERPRINTS).read_text(encoding="utf-8").split())
        elif home is None or not path.is_dir():
            unknown[Path(settings.model).name] = None
        elif home not in runs:
            runs.add(home)
            try:
                models.append(sampling_recipe_of(Run.open(home)).policy)
                training += _trained_elsewhere(Run.open(home), run)
            except (DataError, RunError):  # the other run was moved without its data
                unknown[Path(settings.model).name] = None
    return find_leaks(questions.tasks, training, pretrained, list(unknown))


def _trained_elsewhere(other: Run, run: Run) -> list[Task]:
    """Return the trained tasks of another run; ids of another corpus mean other things, so they are dropped."""
    same = other.manifest.digests.get("corpus") == run.manifest.digests.get("corpus")
    with Environment.open(other) as environment:
        tasks = trained_tasks(other, environment, environment.tasks("all", check=False))
    return (
        tasks
        if same
        else [replace(task, id=f"{other.path.name}: {task.id}", gold=()) for task in tasks]
    )


def open_evaluator(
    evaluation: Evaluation, environment: Environment, questions: Questions, progress: Progress
) -> Evaluator:
    """Open the evaluator on questions from `held_out`."""
    tasks = questions.tasks
    recipe, policy, retriever = evaluation.recipe, environment.recipe.policy, environment.retriever
    refuse_changes(evaluation.run, environment.recipe, {"retriever": retriever.digest})
    limits = {name: settings.max_tokens for name, settings in evaluation.policies.others.items()}
    environment.check_policies(evaluation.policies.others)
    for name, prompt in (
        (system.name, system.prompt or ZERO_SHOT) for system in evaluation.systems
    ):
        if unknown := {*prompt.demos, *prompt.instructions}.difference(environment.replay.names):
            predictors = ", ".join(environment.replay.names)
            raise ConfigError(
                f"demos.{name}: unknown predictor {min(unknown)!r}; in the program: {predictors}"
            )
    decoding = Decoding(policy.max_tokens, recipe.temperature, policy.top_p, recipe.seed, limits)
    search = environment.recipe.retriever
    inputs = [
        environment.corpus.digest,
        retriever.digest,
        environment.program_digest,
        search.k,
        search.exclude_seen,
    ]
    measures = evaluation.measures
    answers = [task.answers for task in tasks]
    names = [
        one if isinstance(one, str) else [name, one.model_dump(mode="json")]
        for name, one in measures.items()
    ]
    more = filter(None, [sources_digest(_functions(measures)), evaluation.reader])
    key = digest(inputs, names, questions.digest, answers, *more)
    run, directory, policies, samples = (
        evaluation.run,
        evaluation.directory,
        evaluation.policies,
        evaluation.samples,
    )
    shared = (
        run,
        directory,
        environment,
        decoding,
        samples,
        policies,
        tasks,
        measures,
        key,
        progress,
    )
    environment.progress = progress  # of building indexes
    others = {
        name: environment.searching_with(one, name) for name, one in recipe.retrievers.items()
    }
    return Evaluator(*shared, others, recipe.reader, recipe.dtype)


def _functions(measures: Measures) -> list[str]:
    return [name for spec in measures.values() for name in function_names(spec)]


def _refuse_search_alone(evaluation: Evaluation, tasks: Sequence[Task]) -> None:
    """Refuse oracle titles if no task has gold documents, and other searches if also no measure or reader applies."""
    if any(task.gold for task in tasks):
        return
    useful = evaluation.recipe.reader or scores_search(evaluation.recipe.specs, tasks)
    names = [
        system.name
        for system in evaluation.systems
        if system.method == ORACLE or (system.searches and not useful)
    ]
    if names:
        left = [name for name in evaluation.recipe.systems if name not in names]
        raise ConfigError(
            f"systems: {', '.join(names)}: without gold documents, there is nothing to compare their searches with; "
            f"remove them, as in systems: [{', '.join(left) or 'base'}]"
        )


def _refuse_other_results(evaluation: Evaluation, data: str) -> None:
    """Raise an error if the directory has results for different questions or decoding settings."""
    old, recipe = evaluation.summary(), evaluation.recipe
    if old:
        free = free_keys(EvalRecipe) | (
            set() if recipe.temperature > 0 else {"seed"}
        )  # greedy runs need no seed
        keys = old.keys() & EvalRecipe.model_fields.keys() - {
            "data"
        }  # in the summary, ``data`` is a digest
        before = {**{key: old[key] for key in keys}, "digest": {"questions": old["data"]}}
        now = {**recipe.model_dump(mode="json", include=keys), "digest": {"questions": data}}
        check_resumable(
            evaluation.directory, before, {**now, "reader": evaluation.reader}, free, _RENAME
        )
