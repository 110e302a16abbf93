"""Preparation of an evaluation: its recipe, its tasks, its evaluator, and its estimated cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leret.config.base import free_keys, kind_paths, paths_in
from leret.config.evaluation import EvalRecipe, ReaderSettings, label
from leret.config.load import sampling_recipe_of
from leret.config.policy import PolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.classes import sources_digest
from leret.core.errors import ConfigError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import check_resumable, completed, input_stamps, stage_key
from leret.core.types import digest
from leret.evaluation.measures import Measures, all_measures
from leret.evaluation.questions import Questions, held_out
from leret.evaluation.runner import Evaluator, Policies
from leret.evaluation.systems import BASE, System, available, select
from leret.policies.load import compute_digest
from leret.rewards import function_names
from leret.rollouts.actors import Decoding
from leret.rollouts.environment import Environment, recipe_files, refuse_changes
from leret.sampling.estimate import steps_of

_RENAME = "choose a new name for this evaluation: --set evaluation=NAME"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, resolved from its recipe before data and models are loaded.

    ``key`` is a digest of all inputs of the summary. Files enter the digest by size and
    modification time.
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
        """Number of sentences per task (babilong only); None if it differs between tasks."""
        for data in (self.recipe.data, self.sampling.data):
            length = getattr(data, "sentences", None)
            if isinstance(length, int):
                return length
        return None

    @property
    def samples(self) -> int:
        """Runs per question for systems with an LM.

        1 at temperature 0, because repeated runs would be identical.
        """
        return self.recipe.samples if self.recipe.temperature > 0 else 1

    @property
    def page(self) -> Path:
        if self.directory == self.run.eval:
            return self.run.report
        return self.directory / "report.html"

    @property
    def delivers(self) -> bool:
        """Return whether to write R/program.

        A named evaluation does so only if no unnamed one has a summary.
        """
        return self.directory == self.run.eval or not (self.run.eval / "summary.json").is_file()

    def questions(self, environment: Environment) -> Questions:
        """Return the questions to evaluate; RunError if the directory has results of others."""
        questions = held_out(self.recipe, self.run, environment, self.systems)
        _refuse_other_results(self, questions.digest)
        return questions

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; an empty dict if there is none."""
        return self.run.summaries().get(self.recipe.evaluation_name or "", {})

    def done(self) -> dict[str, Any] | None:
        """Return the summary if this evaluation is complete and no question failed, else None."""
        if self.delivers and not (self.run.program / "program.json").is_file():
            return None
        if completed(self.directory, "eval", self.key) is None:
            return None
        return self.summary() or None


@dataclass(frozen=True)
class EvalEstimate:
    """Estimated cost of an evaluation, for `--dry-run`."""

    questions: int
    systems: tuple[str, ...]
    to_ask: tuple[str, ...]  # systems that still have questions to run
    steps: int | None
    """LM calls per run of the program; None if they depend on the LM, or no results are missing."""
    lm_calls: int | None  # upper bound for all missing questions; None if ``steps`` is unknown
    done: bool
    choose_on: EvalEstimate | None = None  # evaluation of the policies on the split ``choose_on``


def estimate(recipe: EvalRecipe, run: Run) -> EvalEstimate:
    """Estimate the cost of `leret.evaluation.stage.evaluate`.

    Raises the same errors, except policy errors.
    """
    evaluation = resolve(recipe, run)
    whole = _estimate(evaluation)
    choice = choosing(evaluation)
    if choice is None:
        return whole
    return replace(whole, choose_on=_estimate(resolve(choice, run)))


def choosing(evaluation: Evaluation) -> EvalRecipe | None:
    """Return the recipe for evaluating the policies on the split ``choose_on``.

    None if there is no choice to make.
    """
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


def _estimate(evaluation: Evaluation) -> EvalEstimate:
    names = tuple(system.name for system in evaluation.systems)
    before = evaluation.done()
    if before is not None:
        return EvalEstimate(before["n_questions"], names, (), None, 0, True)
    with Environment.open(evaluation.run) as environment:
        questions = evaluation.questions(environment)
        steps = steps_of(environment)
        runs = _missing_runs(evaluation, environment, questions)
    lm_calls = None
    if steps is not None:
        with_lm = [system for system in evaluation.systems if system.prompt is not None]
        lm_calls = steps * sum(runs[system.name] for system in with_lm)
        if evaluation.recipe.reader:
            lm_calls += sum(runs.values())
    to_ask = tuple(name for name, n in runs.items() if n)
    return EvalEstimate(len(questions.tasks), names, to_ask, steps, lm_calls, done=False)


def _missing_runs(
    evaluation: Evaluation, environment: Environment, questions: Questions
) -> dict[str, int]:
    """Return the number of runs without stored results by system."""
    runs = {}
    for system in evaluation.systems:
        samples = evaluation.samples if system.prompt is not None else 1
        runs[system.name] = len(questions.tasks) * samples
    if not _has_index(environment):  # without an index, no results are stored yet
        return runs
    evaluator = open_evaluator(evaluation, environment, questions, Progress())
    for system in evaluation.systems:
        if system.retriever is None or _has_index(evaluator.others[system.retriever]):
            _, todo = evaluator.missing(system)
            runs[system.name] = len(todo)
    return runs


def _has_index(environment: Environment) -> bool:
    index = environment.recipe.retriever.index_directory(environment.cache)
    return index is None or index.is_dir()


def resolve(recipe: EvalRecipe, run: Run) -> Evaluation:
    """Resolve a recipe without loading data or models.

    ConfigError for unknown systems, measures or baseline.
    """
    sampled = sampling_recipe_of(run)
    choices = available(run, recipe.demos, recipe.actors, recipe.retrievers)
    systems = select(recipe.systems, choices, (*recipe.demos, *recipe.actors))
    if recipe.baseline not in choices:
        raise ConfigError(
            label(f"baseline: unknown system {recipe.baseline!r}; available: {', '.join(choices)}")
        )
    measures = all_measures(recipe.specs)
    directory = run.eval / (recipe.evaluation_name or "")
    for name in (*choices, *(system.name for system in systems)):
        if name == recipe.evaluation_name or (directory / name / "summary.json").is_file():
            raise ConfigError(
                f"evaluation: {name!r} names both a system and an evaluation; {_RENAME}"
            )
    policies = Policies(sampled.policy, {**sampled.policies, **recipe.policies})
    if any(system.policy == BASE for system in systems) and not recipe.policies:
        _refuse_changed_base(run, sampled.policy, policies, choices[BASE])
    reader = None if recipe.reader is None else _reader_settings(recipe.reader)
    key = _inputs_key(recipe, run, systems, sampled, policies, measures, reader)
    return Evaluation(recipe, run, systems, sampled, policies, measures, directory, key, reader)


def _refuse_changed_base(
    run: Run, sampled: PolicySettings, policies: Policies, base: System
) -> None:
    rounds = run.manifest.rounds
    if sampled.kind != "local" or not rounds:
        return
    if policies.digest(base) != rounds[0]["digest"]:
        raise RunError(
            f"policy.model: {sampled.model} has changed since {run.path} was sampled; "
            "restore the model's files, or sample a new run"
        )


def _inputs_key(
    recipe: EvalRecipe,
    run: Run,
    systems: Sequence[System],
    sampled: SamplingRecipe,
    policies: Policies,
    measures: Measures,
    reader: Mapping[str, Any] | None,
) -> str:
    """Return a digest of all inputs of the summary."""
    prompts: list[list[Any]] = []
    for system in systems:
        if system.prompt is None:
            prompts.append([system.name, None, None])
        else:
            prompts.append([system.name, system.prompt.digest, policies.digest(system)])
    indexes = []
    kinds: list[str] = []
    for retriever in recipe.retrievers.values():
        files = [path for _, path, mark in paths_in(retriever) if not mark.may_be_missing]
        indexes.append(input_stamps(*files))
        kinds += kind_paths(retriever)
    return stage_key(
        recipe,
        "a hop is a search",  # in older evaluations, a hop was an LM call
        run.sampling(),
        run.manifest.digests,
        prompts,
        input_stamps(run.store, run.preferences / "train.parquet", recipe.questions),
        input_stamps(*recipe_files(sampled)),
        indexes,
        *filter(None, [sources_digest(_functions(measures)), sources_digest(kinds), reader]),
    )


def _reader_settings(reader: ReaderSettings) -> dict[str, Any]:
    """Return the model, the digest and the settings of a reader."""
    settings: dict[str, Any] = {
        "model": Path(reader.policy.model).name,
        "digest": compute_digest(reader.policy),
    }
    settings.update(reader.policy.model_dump(include={"max_tokens", "enable_thinking", "template"}))
    settings.update(reader.model_dump(exclude={"policy"}))
    return settings


def open_evaluator(
    evaluation: Evaluation, environment: Environment, questions: Questions, progress: Progress
) -> Evaluator:
    """Open the evaluator on questions from `held_out`."""
    recipe = evaluation.recipe
    retriever = environment.retriever
    refuse_changes(evaluation.run, environment.recipe, {"retriever": retriever.digest})
    environment.check_policies(evaluation.policies.others)
    for system in evaluation.systems:
        if system.prompt is not None:
            system.prompt.check_predictors(environment.replay.names, f"demos.{system.name}")
    policy = environment.recipe.policy
    limits = {name: settings.max_tokens for name, settings in evaluation.policies.others.items()}
    decoding = Decoding(policy.max_tokens, recipe.temperature, policy.top_p, recipe.seed, limits)
    search = environment.recipe.retriever
    inputs = [
        environment.corpus.digest,
        retriever.digest,
        environment.program_digest,
        search.k,
        search.exclude_seen,
    ]
    measures: list[Any] = []
    for name, spec in evaluation.measures.items():
        if isinstance(spec, str):
            measures.append(spec)
        else:
            measures.append([name, spec.model_dump(mode="json")])
    answers = [task.answers for task in questions.tasks]
    sources = sources_digest(_functions(evaluation.measures))
    more = filter(None, [sources, evaluation.reader])
    environment.progress = progress  # of building indexes
    others = {}
    for name, settings in recipe.retrievers.items():
        others[name] = environment.searching_with(settings, name)
    return Evaluator(
        run=evaluation.run,
        directory=evaluation.directory,
        environment=environment,
        decoding=decoding,
        samples=evaluation.samples,
        policies=evaluation.policies,
        questions=questions.tasks,
        measures=evaluation.measures,
        key=digest(inputs, measures, questions.digest, answers, *more),
        progress=progress,
        others=others,
        reader=recipe.reader,
        dtype=recipe.dtype,
    )


def _functions(measures: Measures) -> list[str]:
    return [name for spec in measures.values() for name in function_names(spec)]


def _refuse_other_results(evaluation: Evaluation, data: str) -> None:
    """Raise an error if the directory has results for different questions or decoding settings."""
    old = evaluation.summary()
    if not old:
        return
    recipe = evaluation.recipe
    free = free_keys(recipe)
    if recipe.temperature == 0:
        free = free | {"seed"}  # greedy runs need no seed
    keys = old.keys() & EvalRecipe.model_fields.keys() - {"data"}  # its ``data`` is a digest
    before = {key: old[key] for key in keys}
    before["digest"] = {"questions": old["data"]}
    now = recipe.model_dump(mode="json", include=keys)
    now["digest"] = {"questions": data}
    now["reader"] = evaluation.reader
    check_resumable(evaluation.directory, before, now, free, _RENAME)
