"""What a sampling recipe names, opened: corpus, questions, retriever, program.

Sampling opens it from its recipe, evaluation from the run that sampling wrote, so that both see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError

from leret.config.base import RecipePath, free_keys, paths_in, with_paths
from leret.config.load import sampling_recipe_of
from leret.config.policy import by_predictor
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, ProgramError
from leret.core.runs import Run, program_digest
from leret.core.stages import check_resumable, completed, input_stamps, source_files, stage_key
from leret.core.types import Json, Task, digest
from leret.core.yaml import Key
from leret.datasets.corpus import Corpus
from leret.datasets.load import has_corpus, load_corpus, load_tasks
from leret.policies.base import Policy
from leret.policies.load import combine_policies, shared_policy
from leret.rewards import function_names
from leret.rewards.functions import source_of, sources_digest

if TYPE_CHECKING:
    import dspy

    from leret.core.progress import Progress
    from leret.programs.needs import NeedsCompletion
    from leret.programs.prompts import Formatter
    from leret.programs.replay import Replay
    from leret.programs.runner import ProgramRunner
    from leret.programs.saved import ProgramSource
    from leret.retrieval.base import Retriever
    from leret.retrieval.batching import SearchBatcher
    from leret.rollouts.states import Role


class Environment:
    """Everything behind a program but its policy; each part is opened when it is first asked for.

    Attributes:
        role: answers for a call and the policy in training; None if the recipe's policies do.
    """

    role: Callable[[NeedsCompletion, Policy], Role] | None = None

    def __init__(self, recipe: SamplingRecipe, cache: Path, told: Progress | None = None) -> None:
        self.recipe = recipe
        self.cache = cache
        self.told = told
        self.skipped: dict[str, int] = {}
        """Bad records that the last `questions` left out, by kind of fault."""
        self.held_out: frozenset[str] = frozenset()
        """As the last `questions` found it, see `leret.datasets.load.Loaded`."""

    @classmethod
    def open(cls, run: Run) -> Environment:
        """The workbench of a sampled run."""
        return cls(sampling_recipe_of(run), run.cache)

    def tasks(
        self, split: str | None = None, limit: int | None = None, part: str | None = None, *, check: bool = True
    ) -> list[Task]:
        """Questions of a split, by default the recipe's; a smaller limit gives some of a larger one's.

        ``check`` refuses gold ids that the corpus does not hold, for which it is read.
        """
        data = self.recipe.data
        chosen = data.model_copy(update={"split": split or data.split, "limit": limit, "part": part})
        loaded = load_tasks(chosen, self.corpus if check and self._has_corpus else None)
        self.skipped, self.held_out = dict(loaded.skipped), loaded.held_out
        return list(loaded)

    @cached_property
    def corpus(self) -> Corpus:
        """The documents; none where the recipe names none, and its engine has its own behind HTTP."""
        return load_corpus(self.recipe.data) if self._has_corpus else Corpus(())

    @property
    def _has_corpus(self) -> bool:
        return self.recipe.retriever.needs_corpus or has_corpus(self.recipe.data)

    @cached_property
    def retriever(self) -> Retriever:
        """The search engine over `corpus`; its index is built where it is missing."""
        from leret.retrieval.caching import with_cache

        return with_cache(self.engine, self.recipe.retriever)

    @cached_property
    def engine(self) -> Retriever:
        """The search engine, without the cache of rankings."""
        from leret.retrieval.load import load_retriever

        corpus = self.corpus if self._has_corpus else None
        return load_retriever(self.recipe.retriever, corpus, self.cache, self.told)

    @cached_property
    def source(self) -> ProgramSource:
        from leret.programs.saved import ProgramSource

        settings = self.recipe.program
        path, _, name = settings.path.rpartition(":")
        return ProgramSource(Path(path), name, settings.arguments)

    def program(self) -> dspy.Module:
        """The program, a new one at every call."""
        from leret.programs.load import load_program

        settings = self.recipe.retriever
        source = self.source
        return load_program(
            source.path, source.name, source.arguments, k=settings.k, exclude_seen=settings.exclude_seen
        )

    def check_policies(self, policies: Collection[str]) -> None:
        """Refuse a policy of a step that the program does not have."""
        names = self.replay.names if policies else ()
        if unknown := [name for name in policies if name not in names]:
            raise ConfigError(
                f"policies.{unknown[0]}: the program has no predictor or pick of that name; it has {', '.join(names)}"
            )

    def policies(self, policy: Policy, predictors: Collection[str] | None) -> Policy:
        """Who answers while ``policy`` is trained for some predictors: the recipe's policies of all others."""
        settings = by_predictor(self.recipe.policy, self.recipe.policies, None, predictors)
        return combine_policies({name: policy if one is None else shared_policy(one) for name, one in settings.items()})

    def notes(self) -> list[str]:
        """Return what to look at: records left out, and another ``k`` in the program than in the recipe."""
        from leret.programs.load import differing_k

        left_out = [f"data: {n:,} records are left out: {kind}" for kind, n in self.skipped.items()]
        return left_out + differing_k(self.replay.program, self.source.arguments, self.recipe.retriever.k)

    @cached_property
    def adapter(self) -> dspy.Adapter:
        from leret.programs.adapters import make_adapter

        return make_adapter(self.recipe.program.adapter)

    @cached_property
    def replay(self) -> Replay:
        """Runs the program as a function of its completions; one serves all questions of an event loop."""
        from leret.programs.replay import Replay

        return Replay(self.program(), self.adapter)

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
        return sources_digest(name for spec in self.recipe.sampling.rewards for name in function_names(spec))

    def close(self) -> None:
        """Let go of what was opened; a retriever that waits for its server gives up."""
        close = getattr(self.__dict__.get("retriever"), "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def questions_digest(questions: Sequence[Task]) -> str:
    """Names questions by all that is scored with."""
    return digest([[q.id, q.text, list(q.gold), *([q.relevance] if q.relevance else [])] for q in questions])


def resolve_recipe(recipe: SamplingRecipe, base_dir: Path) -> SamplingRecipe:
    """The recipe with its relative paths made absolute where they exist under ``base_dir``."""

    def found(key: Key, given: str, mark: RecipePath) -> str:
        path = base_dir / given
        return given if given in mark.names or not (path.exists() or mark.may_be_missing) else str(path.resolve())

    return with_paths(recipe, found)


def refuse_changes(run: Run, recipe: SamplingRecipe, digests: Mapping[str, str]) -> None:
    """Refuse to mix samples of two recipes in one run. The policy may change (another round), and what is `Free`."""
    before, digests_before = run.manifest.sampling, run.manifest.digests
    if before is not None:
        with suppress(ValidationError):  # a key that came after the run has its default there
            before = SamplingRecipe.model_validate(before).model_dump(mode="json")
        known = {name: value for name, value in digests_before.items() if name in digests}
        now = {**recipe.model_dump(mode="json"), "digest": {name: digests[name] for name in known}}
        check_resumable(run.path, {**before, "digest": known}, now, free_keys(SamplingRecipe))


_OTHERWISE = "name a new run directory; `leret rescore` takes another reward"


def refuse_changed_files(run: Run, environment: Environment, *, reward: bool = True) -> None:
    """Refuse another program, reward, corpus or questions than the run was sampled with; a new run has none.

    Every stage of a sampled run asks this. Files that still have the stamps they were sampled with are not read.
    """
    known, before = run.manifest.digests, run.manifest.sampling
    if before is None or completed(
        run.path, "sample", stage_key(environment.recipe, recipe_stamps(environment.recipe))
    ):
        return
    asked = before["data"].get("limit"), before["data"].get("part")
    digests: dict[str, Callable[[], str | None]] = {
        "program": lambda: environment.program_digest,
        "reward": lambda: environment.reward_digest,
        "corpus": lambda: environment.corpus.digest,
        "questions": lambda: questions_digest(environment.tasks(None, *asked)),
    }
    for name, found in digests.items():
        if name in known and (reward or name != "reward"):
            check_resumable(run.path, {"digest": {name: known[name]}}, {"digest": {name: found()}}, (), _OTHERWISE)


def refuse_changes_since_sampling(run: Run, stage: str) -> None:
    """Refuse changed files for a stage that reads stored samples, and can do so where program and data are absent."""
    try:
        with Environment.open(run) as environment:
            refuse_changed_files(run, environment)
    except (ProgramError, DataError) as error:
        run.event(stage, "files not checked", why=str(error))


def recipe_stamps(recipe: SamplingRecipe) -> Json:
    """Stamps of the files that a recipe names, and of the modules that these import."""
    modules = (source_of(name) for spec in recipe.sampling.rewards for name in function_names(spec))
    files = [Path(path) for path in (*(path for _, path, _ in paths_in(recipe)), *modules) if path]
    return input_stamps(*files, *(helper for file in files for helper in source_files(file)[1:]))
