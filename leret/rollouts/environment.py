"""The environment of a sampling recipe (corpus, tasks, retriever, program).

Later stages open it from a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from leret.config.base import free_keys, paths_in
from leret.config.load import sampling_recipe_of
from leret.config.policy import by_predictor
from leret.config.retriever import RetrieverSettings
from leret.config.sampling import SamplingRecipe, SamplingSettings
from leret.config.training import RoundRecipe
from leret.core.classes import is_path, source_of, sources_digest
from leret.core.errors import ConfigError, DataError, ProgramError
from leret.core.runs import Run, program_digest
from leret.core.stages import check_resumable, completed, input_stamps, source_files, stage_key
from leret.core.types import Task, digest
from leret.datasets.corpus import Corpus
from leret.datasets.load import UNSPLIT, has_corpus, load_corpus, load_tasks, skipped_notes
from leret.policies.base import Policy
from leret.policies.load import combine_policies, shared_policy, tool_reader
from leret.retrieval.base import Retriever
from leret.retrieval.caching import with_cache
from leret.retrieval.load import load_retriever
from leret.rewards import function_names, scoring

if TYPE_CHECKING:
    import dspy

    from leret.core.progress import Progress
    from leret.programs.needs import NeedsCompletion
    from leret.programs.prompts import Formatter
    from leret.programs.replay import Replay
    from leret.programs.runner import ProgramRunner
    from leret.programs.saved import ProgramSource
    from leret.retrieval.batching import SearchBatcher
    from leret.rollouts.actors import Role
    from leret.rollouts.hints import Hints


class Environment:
    """Corpus, tasks, retriever and program of a sampling recipe, each loaded on first use.

    Attributes:
        role: function that returns the role for a call, given the policy in training; None means
            the recipe's roles.
        skipped: records that `tasks` last skipped, by kind. ``held_out``, ``gold``: see
            `leret.datasets.load.Loaded`.
    """

    role: Callable[[NeedsCompletion, Policy], Role] | None = None

    def __init__(
        self, recipe: SamplingRecipe, cache: Path, progress: Progress | None = None
    ) -> None:
        self.recipe = recipe
        self.cache = cache
        self.progress = progress
        self.skipped: dict[str, int] = {}
        self.held_out: frozenset[str] = frozenset()
        self.gold: Mapping[str, bool] = {}

    @classmethod
    def open(cls, run: Run, *, latest: bool = False) -> Environment:
        """Open the environment of a run.

        ``latest`` gives predictors with ``policies`` the models of the last round.
        """
        recipe = sampling_recipe_of(run)
        rounds = run.manifest.rounds
        models = rounds[-1].get("models") if latest and rounds else None
        if models:
            policies = {
                key: policy.model_copy(update={"model": models[key]})
                for key, policy in recipe.by_predictor.items()
            }
            policy = policies.pop("")
            recipe = recipe.model_copy(update={"policy": policy, "policies": policies})
        return cls(recipe, run.cache)

    def tasks(
        self,
        split: str | None = None,
        limit: int | None = None,
        part: str | None = None,
        *,
        check: bool = True,
    ) -> list[Task]:
        """Read the tasks of a split (default: the recipe's).

        ``check`` rejects gold ids missing from the corpus.
        """
        data = self.recipe.data
        update = {"split": split or data.split, "limit": limit, "part": part}
        chosen = data.model_copy(update=update)
        if self._has_corpus and (check or data.gold == "parent"):
            loaded = load_tasks(chosen, self.corpus, self.corpus.parents)
        else:
            loaded = load_tasks(chosen)
            if UNSPLIT in loaded.skipped and self._has_corpus:
                loaded = load_tasks(chosen, self.corpus, self.corpus.parents)
        self.skipped = dict(loaded.skipped)
        self.held_out = loaded.held_out
        self.gold = loaded.gold
        return list(loaded)

    @cached_property
    def corpus(self) -> Corpus:
        if not self._has_corpus:
            return Corpus(())
        return load_corpus(self.recipe.data)

    @property
    def _has_corpus(self) -> bool:
        return self.recipe.retriever.needs_corpus or has_corpus(self.recipe.data)

    def searching_with(self, retriever: RetrieverSettings, name: str) -> Environment:
        """Return this environment with another retriever.

        Its index is in ``eval/NAME`` of the cache.
        """
        recipe = self.recipe.model_copy(update={"retriever": retriever})
        environment = Environment(recipe, self.cache / "eval" / name, self.progress)
        if self._has_corpus:
            environment.corpus = self.corpus
        return environment

    @cached_property
    def retriever(self) -> Retriever:
        """The retriever over `corpus`, with a cache; builds the index if it is missing."""
        return with_cache(self.engine, self.recipe.retriever)

    @cached_property
    def engine(self) -> Retriever:
        corpus = self.corpus if self._has_corpus else None
        return load_retriever(self.recipe.retriever, corpus, self.cache, self.progress)

    @cached_property
    def source(self) -> ProgramSource:
        from leret.programs.saved import ProgramSource

        settings = self.recipe.program
        path, _, name = settings.path.rpartition(":")
        return ProgramSource(Path(path), name, settings.arguments)

    def program(self) -> dspy.Module:
        from leret.programs.load import load_program

        settings = self.recipe.retriever
        source = self.source
        return load_program(
            source.path,
            source.name,
            source.arguments,
            k=settings.k,
            exclude_seen=settings.exclude_seen,
        )

    def check_policies(self, policies: Collection[str]) -> None:
        if not policies:
            return
        names = self.replay.names
        for name in policies:
            if name not in names:
                available = ", ".join(names)
                raise ConfigError(
                    f"policies.{name}: unknown predictor or pick; "
                    f"available in the program: {available}"
                )

    def policies(self, policy: Policy, predictors: Collection[str] | None) -> Policy:
        """Return ``policy`` for ``predictors`` and the recipe's policies for all others."""
        settings = by_predictor(self.recipe.policy, self.recipe.policies, None, predictors)
        policies: dict[str, Policy] = {}
        for name, policy_settings in settings.items():
            if policy_settings is None:
                policies[name] = policy
            else:
                policies[name] = shared_policy(policy_settings)
        return combine_policies(policies)

    def hints(self) -> Hints:
        """Return a writer of hints about this environment's documents."""
        from leret.rollouts.hints import Hints

        corpus = self.corpus
        return Hints(corpus, corpus.first_chunks)

    def notes(self) -> list[str]:
        """Return `data_notes`, and a note if the program and the recipe set different ``k``."""
        from leret.programs.load import differing_k

        k = self.recipe.retriever.k
        return self.data_notes() + differing_k(self.replay.program, self.source.arguments, k)

    def data_notes(self) -> list[str]:
        """Return notes on skipped and doubtful records of the last questions and of the corpus."""
        return skipped_notes("data", self.skipped) + skipped_notes("corpus", self.corpus.skipped)

    @cached_property
    def adapter(self) -> dspy.Adapter:
        from leret.programs.adapters import make_adapter

        return make_adapter(self.recipe.program.adapter)

    @cached_property
    def replay(self) -> Replay:
        from leret.programs.replay import Replay

        return Replay(self.program(), self.adapter, read=tool_reader(self.recipe.policy))

    @cached_property
    def formatter(self) -> Formatter:
        from leret.programs.prompts import Formatter

        return Formatter(self.replay)

    def runner(self, searches: SearchBatcher | None) -> ProgramRunner:
        from leret.programs.runner import ProgramRunner

        return ProgramRunner(self.replay, self.formatter, searches)

    @property
    def program_digest(self) -> str:
        return program_digest(self.recipe.program.model_dump(mode="json"))

    @property
    def reader_digest(self) -> str | None:
        return sources_digest([self.recipe.data.kind])

    @property
    def reward_digest(self) -> str | None:
        return sources_digest(_function_names(self.recipe))

    def close(self) -> None:
        close = getattr(self.__dict__.get("retriever"), "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def questions_digest(questions: Sequence[Task]) -> str:
    """Return a digest of the questions and their labels.

    Answers count only for questions without gold documents.
    """
    rows: list[list[Any]] = []
    for task in questions:
        row: list[Any] = [task.id, task.text, list(task.gold)]
        if task.relevance:
            row.append(task.relevance)
        if not task.gold:
            row.append(task.answers)
        rows.append(row)
    return digest(rows)


def scorable(tasks: Sequence[Task], recipe: SamplingRecipe) -> list[Task]:
    """Return only the tasks with the labels that the reward needs.

    Labels are gold documents or reference answers.
    """
    spec = recipe.sampling.whole_reward
    reward = scoring(spec, "sampling.reward")
    labelled = [task for task in tasks if reward.applies(task)]
    if not labelled:
        parts = " + ".join(reward.parts)
        raise DataError(
            f"data: no question in split {recipe.data.split} has the labels that {parts} needs "
            "(relevant documents to score rankings, reference answers to score answers); "
            f"{len(tasks)} questions read; use another split or file"
        )
    return labelled


def refuse_changes(run: Run, recipe: SamplingRecipe, digests: Mapping[str, str]) -> None:
    """Refuse a recipe that differs from the run's.

    The policy (for another round) and `Free` keys may differ.
    """
    before = run.manifest.sampling
    if before is None:
        return
    with suppress(ValidationError):  # keys added after the run get their defaults
        before = SamplingRecipe.model_validate(before).model_dump(mode="json")
    digests_before = run.manifest.digests
    names = [name for name in digests_before if name in digests]
    before = {**before, "digest": {name: digests_before[name] for name in names}}
    now = recipe.model_dump(mode="json")
    now["digest"] = {name: digests[name] for name in names}
    check_resumable(run.path, before, now, free_keys(recipe))


_OTHERWISE = "name a new run directory, or change the reward with `leret rescore`"


def refuse_changed_files(run: Run, environment: Environment, *, reward: bool = True) -> None:
    """Refuse a program, reward, corpus or questions that changed since sampling.

    Equal file stamps mean no change.
    """
    before = run.manifest.sampling
    stamps = input_stamps(*recipe_files(environment.recipe))
    key = stage_key(environment.recipe, stamps)
    if before is None or completed(run.path, "sample", key):
        return
    limits = before["data"].get("limit"), before["data"].get("part")
    digests: dict[str, Callable[[], str | None]] = {
        "program": lambda: environment.program_digest,
        "reader": lambda: environment.reader_digest,
        "reward": lambda: environment.reward_digest,
        "corpus": lambda: environment.corpus.digest,
        "questions": lambda: questions_digest(environment.tasks(None, *limits)),
    }
    if not reward:
        del digests["reward"]
    for name, current in digests.items():
        if name in run.manifest.digests:
            digest_before = {"digest": {name: run.manifest.digests[name]}}
            digest_now = {"digest": {name: current()}}
            check_resumable(run.path, digest_before, digest_now, (), _OTHERWISE)


def refuse_changes_since_sampling(run: Run, stage: str) -> None:
    """Refuse changed files in a stage that reads stored samples.

    If program or data is missing, only log an event.
    """
    try:
        with Environment.open(run) as environment:
            refuse_changed_files(run, environment)
    except (ProgramError, DataError) as error:
        run.event(stage, "files not checked", why=str(error))


def has_new_reward(run: Run) -> bool:
    """Return whether the code of a run's reward has changed since the rewards were computed."""
    with Environment.open(run) as environment:
        return environment.reward_digest != run.manifest.digests.get("reward")


def recipe_files(recipe: SamplingRecipe) -> list[Path]:
    """Return the files that a recipe names, and the modules that its Python files import."""
    paths = [path for _, path, _ in paths_in(recipe)]
    modules = [source_of(name) for name in (*_function_names(recipe), *_kind_paths(recipe))]
    files = [Path(path) for path in (*paths, *modules) if path]
    helpers: list[Path] = []
    for file in files:
        helpers += source_files(file)[1:]
    return files + helpers


def _kind_paths(recipe: SamplingRecipe) -> list[str]:
    """Return the paths of the user's kinds in a recipe."""
    kinds = [recipe.data.kind, recipe.retriever.kind]
    kinds += [policy.kind for policy in recipe.by_predictor.values()]
    return [kind for kind in kinds if is_path(kind)]


def _function_names(recipe: SamplingRecipe) -> list[str]:
    """Return the names of the reward functions of a recipe."""
    names: list[str] = []
    for spec in recipe.sampling.rewards:
        names += function_names(spec)
    return names


def training_tasks(environment: Environment, recipe: RoundRecipe) -> list[Task]:
    """Return only the run's tasks that have the labels the reward needs.

    DataError if there are none.
    """
    data = environment.recipe.data
    tasks = environment.tasks(data.split, recipe.limit or data.limit, part=data.part)
    settings = scored_by(environment, recipe)
    sampling_recipe = environment.recipe.model_copy(update={"sampling": settings})
    return scorable(tasks, sampling_recipe)


def scored_by(environment: Environment, recipe: RoundRecipe) -> SamplingSettings:
    """Return the run's sampling settings with the training recipe's reward and credit, if set."""
    update: dict[str, Any] = {}
    if recipe.groups == "question":
        update["credit"] = "final"
    elif recipe.credit is not None:
        update["credit"] = recipe.credit
    if recipe.reward is not None:
        update["reward"] = recipe.reward
        update["final"] = recipe.reward
    return environment.recipe.sampling.model_copy(update=update)
