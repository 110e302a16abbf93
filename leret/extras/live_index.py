"""`engine: live-index`: a picker in training searches a dense index of its own encoders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from leret.config.base import Settings
from leret.config.load import sampling_recipe_of
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Ranking
from leret.policies.base import Policy
from leret.policies.pickers.encoder import SEPARATOR
from leret.policies.pickers.picker import Picker
from leret.rollouts.environment import Environment
from leret.rollouts.rounds import Sampled
from leret.training.job import TrainingJob
from leret.training.model import InitialPolicy, find_picker, sampled_picker
from leret.training.picks.joint import JOINT, JointRecipe, find_actors
from leret.training.picks.pick import PICK, PickRecipe
from leret.training.picks.picking import Method, PickLearner
from leret.training.picks.pqn import PQN, PQNRecipe
from leret.training.rounds.algorithm import writer
from leret.training.rounds.grpo import GRPO
from leret.training.validation import Validation

_ENCODERS = "index-encoders"  # folder with the picker that encoded the live index


class LiveIndexKeys(Settings):
    """Keys of the live index."""

    reindex_rounds: PositiveInt = Field(
        ..., description="rounds between rebuilds of the dense index with the picker's encoders"
    )


class LivePick(LiveIndexKeys, PickRecipe):
    """`pick` with a live index."""

    engine: Literal["live-index"] = "live-index"


class LivePQN(LiveIndexKeys, PQNRecipe):
    """`pqn` with a live index."""

    engine: Literal["live-index"] = "live-index"


class LiveJoint(JointRecipe):
    """`joint` with a live index; the picker has ``reindex_rounds``."""

    engine: Literal["live-index"] = "live-index"
    picker: LivePick = Field(..., description="keys of pick for the picker")


class LiveIndex:
    """A retriever over the run's dense index, and after `encode`, over an index of a picker.

    ``rankings`` contains the rankings of the current round, by query and k. No rankings are cached.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        self._first = environment
        self._current = environment  # an environment opens its engine at the first search
        self._directory = directory
        self.rankings: dict[tuple[str, int], Ranking] = {}
        environment.retriever = self  # for rounds and validation

    @property
    def digest(self) -> str:
        return self._current.engine.digest

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        answers = self._current.engine.search(queries, k)
        for query, ranking in zip(queries, answers, strict=True):
            self.rankings[query, k] = ranking
        return answers

    def encode(self, picker: Picker) -> float:
        """Replace the index.

        Return the share of passages in ``rankings`` that the same searches no longer find.
        """
        n_passages = n_stale = 0
        rankings = self.rankings.copy()
        picker.save(self._directory / _ENCODERS)
        self._use(picker)
        for k in {k for _, k in rankings}:
            old = {query: ranking for (query, depth), ranking in rankings.items() if depth == k}
            for before, after in zip(old.values(), self.search(list(old), k), strict=True):
                n_passages += len(before)
                ids = {passage.doc_id for passage in before}
                n_stale += len(ids.difference(passage.doc_id for passage in after))
        return n_stale / max(1, n_passages)

    def save(self, checkpoint: Path) -> None:
        if self._current is not self._first:
            shutil.copytree(self._directory / _ENCODERS, checkpoint / _ENCODERS, dirs_exist_ok=True)

    def load(self, checkpoint: Path, picker: Picker) -> None:
        self._current = self._first
        if (checkpoint / _ENCODERS).is_dir():
            shutil.copytree(checkpoint / _ENCODERS, self._directory / _ENCODERS, dirs_exist_ok=True)
            self._use(picker)

    def _use(self, picker: Picker) -> None:
        """Search with the saved encoders, with the picker's settings for texts and similarity."""
        settings: Any = picker.settings
        limits: list[Any] = [encoder.max_seq_length for encoder in picker.model.children()]
        limits.append(settings.max_length)
        folder = self._directory / _ENCODERS
        keys = {
            "index": None,
            "model": str(folder / "action"),
            "query_model": str(folder / "state"),
            "query_prefix": settings.query_prefix,
            "document_prefix": settings.document_prefix,
            "separator": SEPARATOR,
            "normalize": settings.similarity == "cosine",
            "max_length": min(filter(None, limits), default=None),
        }
        retriever = self._first.recipe.retriever.model_copy(update=keys)
        recipe = self._first.recipe.model_copy(update={"retriever": retriever})
        self._current = Environment(recipe, self._directory)
        self._current.corpus = self._first.corpus


class LiveIndexLearner(PickLearner):
    """Trains a picker on the rankings of a live index."""

    def __init__(
        self, method: Callable[[Any, float], Method], job: TrainingJob, device: str
    ) -> None:
        assert job.environment is not None
        super().__init__(method, job, device)
        self._index = LiveIndex(job.environment, job.directory.path)

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        logged = super().learn(sampled, number)
        if (number + 1) % self.recipe.reindex_rounds == 0:
            logged["stale"] = self._index.encode(self.policy)
        self._index.rankings.clear()
        return logged

    def run(self, policy: Policy, validation: Validation) -> dict[str, float]:
        """Validate a policy; its searches do not count for ``stale``."""
        figures = super().run(policy, validation)
        self._index.rankings.clear()
        return figures

    def state(self, directory: Path) -> dict[str, Any]:
        self._index.save(directory)
        return super().state(directory)

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        super().load_state(state, directory)
        self._index.load(directory, self.policy)


def find_live_picker(run: Run, recipe: LivePick | LivePQN) -> InitialPolicy:
    """Return the initial picker; TrainingError if the run has no index that its encoders can replace."""
    sampling = sampling_recipe_of(run)
    kinds = (
        sampled_picker(sampling, recipe).kind,
        sampling.retriever.kind,
        getattr(sampling.retriever, "store", "flat"),
        recipe.states,
    )
    if kinds != ("encoder", "dense", "flat", "live"):
        raise TrainingError(
            "engine: live-index needs policy.kind encoder, retriever.kind dense, retriever.store "
            f"flat and states: live, not {', '.join(kinds)}; remove engine and reindex_rounds"
        )
    return find_picker(run, recipe)


def find_live_actors(run: Run, recipe: LiveJoint) -> InitialPolicy:
    """Return the initial policies of a joint training whose picker encodes the index."""
    find_live_picker(run, recipe.picker)
    return find_actors(run, recipe)


ENGINE = {
    "pick": replace(
        PICK, settings=LivePick, learner=LiveIndexLearner, find_initial=find_live_picker
    ),
    "pqn": replace(PQN, settings=LivePQN, learner=LiveIndexLearner, find_initial=find_live_picker),
    "joint": replace(
        JOINT,
        settings=LiveJoint,
        objective=(partial(LiveIndexLearner, PICK.objective), partial(writer, GRPO.objective)),
        find_initial=find_live_actors,
    ),
}
"""`engine: live-index` by algorithm."""
