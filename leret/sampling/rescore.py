"""`leret rescore`: other rewards for the samples of a run, without an LM call, and its pairs made again.

A stored sample has its fields, its ranking (ids and scores) and its number of steps. Texts come from the run's corpus
where a function of the user's own may read them; what the program returned, which is not stored, from running it again
on the stored completions where a reward reads it. Rewards of the program's end stay, since the runs that they come from
are not stored.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.load import sampling_recipe_of
from leret.config.sampling import RewardSettings
from leret.core.errors import ConfigError, RunError
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.core.types import Document, Outcome, Passage, Sample, Task
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Scoring, function_names, names, scoring, values_of
from leret.rewards.answers import ANSWERS
from leret.rewards.functions import source_of
from leret.rollouts.credit import PREFIX, Crediting, credit_of
from leret.rollouts.environment import Environment, refuse_changed_files, resolve_recipe
from leret.rollouts.selection import select_next
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.schema import StateSamples
from leret.sampling.store.store import Store

if TYPE_CHECKING:
    from leret.programs.runner import ProgramRunner

_REST = ("final", "q", "logp")
"""Components that rescoring leaves as they are."""


@dataclass(frozen=True)
class RescoreReport:
    """What `leret rescore` did.

    Attributes:
        samples: that have a reward of their step; ``changed`` of them have another one now.
        other_choices: states whose path the new reward would have continued from another sample.
        notes: what to look at.
    """

    samples: int
    changed: int
    states: int
    other_choices: int
    mean_reward: float
    pairs: int
    no_spread: int
    seconds: float
    notes: Sequence[str] = ()


def rescore(run: Run, reward: str | RewardSettings | None = None, *, progress: Progress | None = None) -> RescoreReport:
    """Give a run's samples the rewards of a recipe's ``reward``, by default of the run's: its function may differ.

    All or none of them change, and the run's recipe with them, at one commit of the store. A call that was stopped
    before it left the old rewards; one that was stopped after it left the new ones without pairs.

    Raises:
        ConfigError: the reward is unknown, has no value for a sample, or the run's credit is of the end alone.
        RunError: the run was not sampled, or is being sampled; or its program, corpus or questions have changed.
    """
    began, progress = time.monotonic(), progress or Silent()
    recipe = sampling_recipe_of(run)
    if reward is not None:
        recipe = recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"reward": reward})})
    recipe = resolve_recipe(recipe, Path.cwd())
    if recipe.sampling.credit == "final":
        raise ConfigError("sampling.credit is final: those rewards are of runs to the end that are not stored; sample")
    spec = recipe.sampling.reward
    with Environment(recipe, run.cache, progress) as environment, Store(run.store) as store:
        refuse_changed_files(run, environment, reward=False)
        pass_over = _Rescoring(environment, store, scoring(spec, "--reward"))
        progress.start("rescoring", len(store.question_ids()))
        new = asyncio.run(pass_over.samples(progress))
        progress.finish()
        digests = {**run.manifest.digests, "reward": environment.reward_digest}
        sections = {"sampling": recipe.model_dump(mode="json")}
        sections["digests"] = {name: value for name, value in digests.items() if value is not None}
        name = run.prepare(sections)
        (run.path / "sample.done").unlink(missing_ok=True)
        shutil.rmtree(run.preferences, ignore_errors=True)  # they are of the old rewards
        store.put_rewards(new, name)
        store.flush()
    run.update()
    settings = recipe.sampling
    made = {"strategy": settings.strategy, "margin": settings.margin, "max_pairs": settings.max_pairs}
    how: dict[str, Any] = {**made, **run.manifest.preferences}
    pairs = build_preferences(run, how["strategy"], how["margin"], how["max_pairs"])
    counts = pass_over.n_samples, pass_over.n_changed, pass_over.n_states, pass_over.n_other_choices
    seconds = round(time.monotonic() - began, 3)
    report = RescoreReport(*counts, pairs.mean_reward, pairs.pairs, pairs.no_spread, seconds, tuple(pass_over.notes()))
    run.event("sample", "rescored", **asdict(report))
    return report


def reads_prediction(spec: str | RewardSettings) -> bool:
    """Whether a reward may look at what the program returned; of a function, whether its file has the word."""
    files = [path for name in function_names(spec) if (path := source_of(name)) is not None]
    return any(name in ANSWERS for name in names(spec)) or any(b"prediction" in path.read_bytes() for path in files)


class _Rescoring:
    """One pass over the samples of a store, question by question."""

    def __init__(self, environment: Environment, store: Store, step: Scoring) -> None:
        settings = environment.recipe.sampling
        self._environment, self._store, self._seed = environment, store, settings.seed
        self._crediting = Crediting(step, None, settings.final_weight)
        self._functions = self._crediting.functions
        self._tasks = {task.id: task for task in environment.tasks(check=False)}
        self._corpus: Mapping[str, Document] = environment.corpus if function_names(settings.reward) else {}
        self._to_end = settings.end_reward is not None
        self._replays = reads_prediction(settings.reward)
        self.n_samples = self.n_changed = self.n_states = self.n_other_choices = self.n_final = 0

    def notes(self) -> Iterator[str]:
        if self.n_other_choices:
            yield (
                f"next states were chosen under the old reward: at {self.n_other_choices:,} of {self.n_states:,} "
                "states the new one goes on from another sample, and what follows there is not what it would sample; "
                "`leret sample` into a new run samples under it"
            )
        if self.n_final:
            yield f"{self.n_final:,} samples are scored by the program's end alone, and stay as they are"

    async def samples(self, progress: Progress) -> list[Sample]:
        """Those whose reward or parts are new."""
        changed: list[Sample] = []
        with ExitStack() as opened:
            runner = None
            if self._replays:
                runner = self._environment.runner(
                    opened.enter_context(closing(SearchBatcher(self._environment.retriever)))
                )
            for (policy, name), found in groupby(
                self._store.groups(), lambda group: (group.policy_digest, group.state.task_id)
            ):
                task, groups = self._tasks.get(name), list(found)
                if task is None:
                    raise RunError(f"question {name} was sampled and is not in the run's data; correct data.questions")
                chosen = {visit.step: visit.chosen for visit in self._store.visits(policy, name)}
                ends = {} if runner is None else await _ends(runner, task, groups, chosen)
                for group in groups:
                    changed += self._group(task, group, chosen.get(group.state.step), ends)
                progress.advance(1)
        return changed

    def _group(self, task: Task, group: StateSamples, chosen: str | None, ends: Mapping[str, Any]) -> list[Sample]:
        old = [sample for sample in group.samples if sample.reward is not None and sample.is_sampled]
        if not old:
            return []
        credit = credit_of(old[0])
        if credit == "final":
            self.n_final += len(old)
            return []
        new = self._crediting.rewards([self._with_parts(task, sample, ends.get(sample.id)) for sample in old], credit)
        known = {sample.id: sample for sample in new}
        if chosen is not None:
            samples = [known.get(sample.id, sample) for sample in group.samples]
            now = select_next(samples, task, self._seed, group.state.draw, through_solved=self._to_end)
            self.n_other_choices += now is not None and now.id != chosen
        self.n_states += 1
        self.n_samples += len(new)
        self.n_changed += sum(one.reward != before.reward for one, before in zip(new, old, strict=True))
        return [one for one, before in zip(new, old, strict=True) if one != before]

    def _with_parts(self, task: Task, sample: Sample, prediction: Any) -> Sample:
        documents = [self._corpus.get(doc_id) for doc_id in sample.doc_ids]
        ranking = tuple(
            Passage(doc_id, document.title if document else "", document.text if document else "", score)
            for doc_id, score, document in zip(sample.doc_ids, sample.scores, documents, strict=True)
        )
        seen = Outcome(task, sample.completion or "", sample.outputs, ranking, prediction, sample.step + 1)
        rest = {n: v for n, v in sample.components.items() if n in _REST or n.startswith(PREFIX)}
        return replace(sample, components={**values_of(self._functions, seen), **rest})


async def _ends(
    runner: ProgramRunner, task: Task, groups: Sequence[StateSamples], chosen: Mapping[int, str | None]
) -> dict[str, Any]:
    """What the program returned after each sample with which it ended, by the sample's id."""
    from leret.programs.needs import Finished, NeedsCompletion, Step
    from leret.programs.replay import SearchResults

    path: tuple[Step, ...] = ()
    results: SearchResults = {}
    need = await runner.advance(task, path, results)
    ends: dict[str, Any] = {}
    for group in groups:
        if not isinstance(need, NeedsCompletion):
            break
        here, following = need, None
        for sample in group.samples:
            if sample.completion is None or sample.failure is not None:
                continue
            step = runner.formatter.step(here, sample.completion)
            end = await runner.advance(task, (*path, step), results)
            if isinstance(end, Finished):
                ends[sample.id] = end.prediction
            if sample.id == chosen.get(group.state.step):
                following = step, end
        if following is None:
            break
        path, need = (*path, following[0]), following[1]
    return ends
