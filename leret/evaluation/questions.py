"""Questions of an evaluation: held out from training, with the labels that the measures need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leret.config.data import GENERATED
from leret.config.evaluation import EvalRecipe
from leret.config.load import sampling_recipe_of
from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError, DataError, RunError
from leret.core.runs import Run
from leret.core.types import Task
from leret.datasets.leaks import FINGERPRINTS, find_leaks, refuse_leaks
from leret.datasets.load import limited, split_name
from leret.evaluation.measures import scorable, scores_search
from leret.evaluation.runner import Policies
from leret.evaluation.systems import OracleTitles, System
from leret.policies.checkpoints import policy_directory
from leret.programs.prompts import Prompt
from leret.rollouts.environment import Environment, questions_digest, refuse_changed_files
from leret.sampling.store.store import Store


@dataclass(frozen=True)
class Questions:
    """Questions to evaluate (``tasks``)."""

    tasks: Sequence[Task]
    trained: Sequence[Task]  # the run's questions that training has seen
    digest: str  # of all questions of the split
    gold: Mapping[str, bool]
    """Gold documents of the data: True if in the corpus; empty if this is unknown."""
    notes: Sequence[str]  # on skipped and doubtful records


def held_out(
    recipe: EvalRecipe, run: Run, environment: Environment, systems: Sequence[System]
) -> Questions:
    """Return the recipe's questions to which a requested measure applies.

    DataError if there are none; ConfigError for systems that only search, if no measure applies to
    the documents found.
    """
    refuse_changed_files(run, environment)
    run_tasks = environment.tasks("all")
    seed = environment.recipe.data.seed
    source = _source(recipe, environment)
    if source is environment:
        split = [task for task in run_tasks if recipe.split in ("all", split_name(task, seed))]
    else:
        split = source.tasks(recipe.split)
    chosen = limited(split, recipe.limit, seed)
    tasks = scorable(recipe.specs, chosen)
    if not tasks:
        raise _no_questions(recipe, len(chosen))
    _refuse_search_alone(recipe, systems, tasks)
    trained = trained_tasks(run, environment, run_tasks)
    refuse_leaks(trained, tasks)
    return Questions(tasks, trained, questions_digest(split), source.gold, source.data_notes())


def _source(recipe: EvalRecipe, environment: Environment) -> Environment:
    """Return the run's environment, with the recipe's changes to its data."""
    data = environment.recipe.data
    if recipe.questions is not None and data.kind in GENERATED:
        raise ConfigError(
            f"questions: {recipe.questions!r} does not apply to a generated world; remove the key"
        )
    changes = dict(recipe.changes)
    if changes and data.kind != "babilong":
        raise ConfigError(
            "data: only babilong data can be changed, "
            f"but the run has {data.kind} data; remove the key"
        )
    if recipe.questions is not None:
        changes["questions"] = recipe.questions
    if not changes:
        return environment
    changed = environment.recipe.model_copy(update={"data": data.model_copy(update=changes)})
    return Environment(changed, environment.cache)


def _refuse_search_alone(
    recipe: EvalRecipe, systems: Sequence[System], tasks: Sequence[Task]
) -> None:
    """Refuse systems that only search if nothing scores their searches.

    Oracle titles need tasks with gold documents, others a measure or reader that applies.
    """
    if any(task.gold for task in tasks):
        return
    useful = recipe.reader or scores_search(recipe.specs, tasks)
    names = []
    for system in systems:
        if isinstance(system, OracleTitles) or (system.only_searches and not useful):
            names.append(system.name)
    if names:
        left = [name for name in recipe.systems if name not in names]
        raise ConfigError(
            f"systems: {', '.join(names)}: without gold documents, there is nothing to compare "
            f"their searches with; remove them, as in systems: [{', '.join(left) or 'base'}]"
        )


def _no_questions(recipe: EvalRecipe, n_questions: int) -> DataError:
    place = recipe.questions or f"split {recipe.split} of the run's data"
    reason = "it is empty"
    if n_questions:
        measures = ", ".join(recipe.specs)
        reason = f"none of its {n_questions} questions has labels for {measures}"
    return DataError(
        f"no questions to evaluate in {place} ({reason}); choose other measures, another split or "
        "question file: rankings are measured by gold documents, and answers by reference answers "
        "(measures: [f1])"
    )


def trained_tasks(run: Run, environment: Environment, tasks: Sequence[Task]) -> list[Task]:
    """Return those of a run's tasks that were sampled, trained on, or used for validation."""
    data = environment.recipe.data
    ids = set[str]()
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            ids |= store.question_ids()
    for note in run.trainings().values():
        ids.update(note.get("validation") or ())
        recipe = (note.get("key") or {}).get("recipe") or {}
        if "limit" in recipe:  # online training also uses questions that are not in the store
            split = (task for task in tasks if data.split in ("all", split_name(task, data.seed)))
            chosen = limited(split, recipe["limit"] or data.limit, data.seed, data.part)
            ids |= {task.id for task in chosen} - environment.held_out
    return [task for task in tasks if task.id in ids]


def check_leaks(
    questions: Questions,
    run: Run,
    systems: Sequence[System],
    policies: Policies,
    reader: PolicySettings | None,
) -> dict[str, Any]:
    """Compare the questions with all recorded texts that the systems and the reader learned from."""
    training = list(questions.trained)
    models: list[PolicySettings] = [] if reader is None else [reader]
    for system in systems:
        if system.prompt is not None:
            models.append(policies.base)
            models += policies.settings(system).values()
            training += _demos(system.name, system.prompt, questions.tasks[0])
    pretrained = set[str]()
    unknown = dict[str, None]()
    runs = {run.path.resolve()}
    for settings in models:  # grows during the loop
        if settings.model == "scratch":
            continue
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


def _demos(system: str, prompt: Prompt, question: Task) -> list[Task]:
    """Return the demos of a prompt that have all inputs of a question."""
    demos = []
    for examples in prompt.demos.values():
        for example in examples:
            inputs = {name: example.get(name) for name in question.inputs}
            if None not in inputs.values():
                demos.append(Task(f"a demo of {system}", inputs))
    return demos


def _trained_elsewhere(source: Run, run: Run) -> list[Task]:
    """Return the trained tasks of another run.

    Ids of another corpus mean other things, so they are dropped.
    """
    with Environment.open(source) as environment:
        tasks = trained_tasks(source, environment, environment.tasks("all", check=False))
    if source.manifest.digests.get("corpus") == run.manifest.digests.get("corpus"):
        return tasks
    return [replace(task, id=f"{source.path.name}: {task.id}", gold=()) for task in tasks]
