"""The environment of a sampling recipe (corpus, tasks, retriever, program); later stages open it from a run."""

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
from leret.rewards.functions import source_of, sources_digest

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


class Environment:
    """Corpus, tasks, retriever and program of a sampling recipe, each loaded on first use.

    Attributes:
        role: function that returns the role for a call, given the policy in training; None means the recipe's roles.
        skipped: records that `tasks` last skipped, by kind. ``held_out``, ``gold``: see `leret.datasets.load.Loaded`.
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
        """Open the environment of a run; ``latest`` gives predictors with ``policies`` the models of the last round."""
        recipe = sampling_recipe_of(run)
        models = run.manifest.rounds[-1].get("models") if latest and run.manifest.rounds else None
        if models:
            new = {
                key: one.model_copy(update={"model": models[key]})
                for key, one in recipe.by_predictor.items()
            }
            recipe = recipe.model_copy(update={"policy": new.pop(""), "policies": new})
        return cls(recipe, run.cache)

    def tasks(
        self,
        split: str | None = None,
        limit: int | None = None,
        part: str | None = None,
        *,
        check: bool = True,
    ) -> list[Task]:
        """Read the tasks of a split (default: the recipe's); ``check`` rejects gold ids missing from the corpus."""
        data = self.recipe.data
        chosen = data.model_copy(
            update={"split": split or data.split, "limit": limit, "part": part}
        )
        corpus = self.corpus if self._has_corpus and (check or data.gold == "parent") else None
        loaded = load_tasks(chosen, corpus, None if corpus is None else corpus.parents)
        if UNSPLIT in loaded.skipped and self._has_corpus:
            loaded = load_tasks(chosen, self.corpus, self.corpus.parents)
        self.skipped, self.held_out, self.gold = dict(loaded.skipped), loaded.held_out, loaded.gold
        return list(loaded)

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus(self.recipe.data) if self._has_corpus else Corpus(())

    @property
    def _has_corpus(self) -> bool:
        return self.recipe.retriever.needs_corpus or has_corpus(self.recipe.data)

    def searching_with(self, retriever: RetrieverSettings, name: str) -> Environment:
        """Return this environment with another retriever; its index is in ``eval/NAME`` of the cache."""
        recipe = self.recipe.model_copy(update={"retriever": retriever})
        other = Environment(recipe, self.cache / "eval" / name, self.progress)
        if self._has_corpus:
            other.corpus = self.corpus
        return other

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
        names = self.replay.names if policies else ()
        if unknown := [name for name in policies if name not in names]:
            raise ConfigError(
                f"policies.{unknown[0]}: unknown predictor or pick; available in the program: {', '.join(names)}"
            )

    def policies(self, policy: Policy, predictors: Collection[str] | None) -> Policy:
        """Return the policies for training: ``policy`` for ``predictors``, the recipe's for all other predictors."""
        settings = by_predictor(self.recipe.policy, self.recipe.policies, None, predictors)
        return combine_policies(
            {name: policy if one is None else shared_policy(one) for name, one in settings.items()}
        )

    def notes(self) -> list[str]:
        """Return `data_notes`, and a note on ``k`` if the program and the recipe set different values."""
        from leret.programs.load import differing_k

        k = self.recipe.retriever.k
        return self.data_notes() + differing_k(self.replay.program, self.source.arguments, k)

    def data_notes(self) -> list[str]:
        """Return notes on skipped and doubtful records of the questions last read and of the corpus."""
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
    def reward_digest(self) -> str | None:
        return sources_digest(
            name for spec in self.recipe.sampling.rewards for name in function_names(spec)
        )

    def close(self) -> None:
        close = getattr(self.__dict__.get("retriever"), "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def questions_digest(questions: Sequence[Task]) -> str:
    """Return a digest of the questions and their labels (answers only of questions without gold documents)."""

    def labels(task: Task) -> list[Any]:
        return [
            list(task.gold),
            *([task.relevance] if task.relevance else []),
            *([] if task.gold else [task.answers]),
        ]

    return digest([[task.id, task.text, *labels(task)] for task in questions])


def scorable(tasks: Sequence[Task], recipe: SamplingRecipe) -> list[Task]:
    """Return only the tasks with the labels that the reward needs, such as gold documents or reference answers."""
    spec = recipe.sampling.whole_reward
    reward = scoring(spec, "sampling.reward")
    known = [task for task in tasks if reward.applies(task)]
    if not known:
        raise DataError(
            f"data: no question in split {recipe.data.split} has the labels that {' + '.join(reward.parts)} needs "
            "(relevant documents to score rankings, reference answers to score answers); "
            f"{len(tasks)} questions read; use another split or file"
        )
    return known


def refuse_changes(run: Run, recipe: SamplingRecipe, digests: Mapping[str, str]) -> None:
    """Refuse a recipe that differs from the run's. The policy (for another round) and `Free` keys may differ."""
    before, digests_before = run.manifest.sampling, run.manifest.digests
    if before is not None:
        with suppress(ValidationError):  # keys added after the run get their defaults
            before = SamplingRecipe.model_validate(before).model_dump(mode="json")
        known = {name: value for name, value in digests_before.items() if name in digests}
        now = {**recipe.model_dump(mode="json"), "digest": {name: digests[name] for name in known}}
        check_resumable(run.path, {**before, "digest": known}, now, free_keys(SamplingRecipe))


_OTHERWISE = "name a new run directory, or change the reward with `leret rescore`"


def refuse_changed_files(run: Run, environment: Environment, *, reward: bool = True) -> None:
    """Refuse a program, reward, corpus or questions that changed since sampling. Equal file stamps mean no change."""
    known, before = run.manifest.digests, run.manifest.sampling
    key = stage_key(environment.recipe, input_stamps(*recipe_files(environment.recipe)))
    if before is None or completed(run.path, "sample", key):
        return
    limits = before["data"].get("limit"), before["data"].get("part")
    digests: dict[str, Callable[[], str | None]] = {
        "program": lambda: environment.program_digest,
        "reward": lambda: environment.reward_digest,
        "corpus": lambda: environment.corpus.digest,
        "questions": lambda: questions_digest(environment.tasks(None, *limits)),
    }
    for name, current in digests.items():
        if name in known and (reward or name != "reward"):
            check_resumable(
                run.path,
                {"digest": {name: known[name]}},
                {"digest": {name: current()}},
                (),
                _OTHERWISE,
            )


def refuse_changes_since_sampling(run: Run, stage: str) -> None:
    """Refuse changed files in a stage that reads stored samples; if program or data is missing, only log an event."""
    try:
        with Environment.open(run) as environment:
            refuse_changed_files(run, environment)
    except (ProgramError, DataError) as error:
        run.event(stage, "files not checked", why=str(error))


def recipe_files(recipe: SamplingRecipe) -> list[Path]:
    """Return the files that a recipe names, and the modules that its Python files import."""
    modules = (source_of(name) for spec in recipe.sampling.rewards for name in function_names(spec))
    files = [Path(path) for path in (*(path for _, path, _ in paths_in(recipe)), *modules) if path]
    return [*files, *(helper for file in files for helper in source_files(file)[1:])]


def training_tasks(environment: Environment, recipe: RoundRecipe) -> list[Task]:
    """Return only the run's tasks that have the labels the reward needs; DataError if there are none."""
    data, settings = environment.recipe.data, scored_by(environment, recipe)
    tasks = environment.tasks(data.split, recipe.limit or data.limit, part=data.part)
    return scorable(tasks, environment.recipe.model_copy(update={"sampling": settings}))


def scored_by(environment: Environment, recipe: RoundRecipe) -> SamplingSettings:
    """Return the run's sampling settings, with any reward and credit that the training recipe sets instead."""
    credit = "final" if recipe.groups == "question" else recipe.credit
    keys = {"credit": credit, "reward": recipe.reward, "final": recipe.reward}
    update = {name: value for name, value in keys.items() if value is not None}
    return environment.recipe.sampling.model_copy(update=update)
