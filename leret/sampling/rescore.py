"""`leret rescore`: compute the rewards of a run's samples again, without LM calls, and build new pairs.

Predictions are not stored, so the program is replayed on the stored completions if a reward reads
predictions. Final rewards keep their stored values, because the continuations that they average are
not stored.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.base import resolve_paths
from leret.config.load import sampling_recipe_of
from leret.config.sampling import RewardSettings
from leret.core.errors import ConfigError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Document, Outcome, Passage, Sample, Task
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Scoring, scoring, values_of
from leret.rollouts.credit import PREFIX, Crediting, credit_of
from leret.rollouts.environment import Environment, refuse_changed_files
from leret.rollouts.selection import select_next
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.store import StateSamples, Store

if TYPE_CHECKING:
    from leret.programs.runner import ProgramRunner

_REST = ("final", "q", "logp")


@dataclass(frozen=True)
class RescoreReport:
    """Results of `leret rescore`.

    ``other_choices`` counts states where the path would have continued with another sample under
    the new reward.
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


def pair_settings(run: Run, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a run's last pairs, otherwise its recipe's, with ``changes``.

    A new strategy starts without the margin and the maximum number of pairs.
    """
    changes = changes or {}
    if "strategy" in changes:
        return dict(changes)
    recipe = sampling_recipe_of(run).sampling
    names = ("strategy", "margin", "max_pairs")
    settings = {name: run.manifest.preferences.get(name, getattr(recipe, name)) for name in names}
    return settings | dict(changes)


def rescore(
    run: Run,
    reward: str | RewardSettings | None = None,
    *,
    pairing: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RescoreReport:
    """Score a run's samples with ``reward`` (default: the run's; its code may have changed).

    One commit updates all rewards and the run's recipe. R/preferences is deleted before it and
    rebuilt after it, by `pair_settings` with the changes in ``pairing``.

    Raises:
        ConfigError: the reward is unknown or has no value for a sample, or the run's credit is
            ``final`` or ``return``.
        RunError: the run has no samples or is being sampled, or its program, corpus or questions
            have changed.
    """
    began = time.monotonic()
    progress = progress or Progress()
    recipe = sampling_recipe_of(run)
    if reward is not None:
        sampling = recipe.sampling.model_copy(update={"reward": reward})
        recipe = recipe.model_copy(update={"sampling": sampling})
    recipe = resolve_paths(recipe, Path.cwd())
    settings = recipe.sampling
    if settings.credit == "final":
        raise ConfigError(
            "sampling.credit is final: its rewards cannot be recomputed; sample again into a new run"
        )
    with Environment(recipe, run.cache, progress) as environment, Store(run.store) as store:
        refuse_changed_files(run, environment, reward=False)
        pass_over = _Rescoring(environment, store, scoring(settings.reward, "--reward"))
        progress.start("rescoring", len(store.question_ids()))
        new = asyncio.run(pass_over.samples(progress))
        progress.finish()
        digests = {**run.manifest.digests, "reward": environment.reward_digest}
        sections = {"sampling": recipe.model_dump(mode="json")}
        sections["digests"] = {name: value for name, value in digests.items() if value is not None}
        name = run.prepare(sections)
        (run.path / "sample.done").unlink(missing_ok=True)
        shutil.rmtree(run.preferences, ignore_errors=True)  # pairs of the old rewards
        store.put_rewards(new, name)
        store.flush()
    run.update()
    pairs = build_preferences(run, **pair_settings(run, pairing))
    report = RescoreReport(
        samples=pass_over.n_samples,
        changed=pass_over.n_changed,
        states=pass_over.n_states,
        other_choices=pass_over.n_other_choices,
        mean_reward=pairs.mean_reward,
        pairs=pairs.pairs,
        no_spread=pairs.no_spread,
        seconds=round(time.monotonic() - began, 3),
        notes=tuple(pass_over.notes()),
    )
    run.event("sample", "rescored", **asdict(report))
    return report


class _PredictionRead(BaseException):
    """A reward read a field that is not stored.

    This is a BaseException, so that user code does not catch it.
    """


class _Unfinished(Outcome):
    """An outcome that raises `_PredictionRead` if its prediction or deep rankings are read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in {"prediction", "deep"}:
            raise _PredictionRead
        return super().__getattribute__(name)


class _Rescoring:
    def __init__(self, environment: Environment, store: Store, step: Scoring) -> None:
        settings = environment.recipe.sampling
        self._environment = environment
        self._store = store
        self._seed = settings.seed
        self._crediting = Crediting(step, None, settings.final_weight)
        self._functions = self._crediting.functions
        self._tasks = {task.id: task for task in environment.tasks(check=False)}
        self._corpus: Mapping[str, Document] = environment.corpus if step.reads_texts else {}
        self._to_end = settings.end_reward is not None
        self._runner: ProgramRunner | None = None  # None until a reward reads a prediction
        self._resources = ExitStack()
        self.n_samples = self.n_changed = self.n_states = self.n_other_choices = self.n_final = 0

    def notes(self) -> Iterator[str]:
        if self.n_other_choices:
            yield (
                f"paths follow the old reward: at {self.n_other_choices:,} of {self.n_states:,} states, the new reward "
                "would continue with another sample and reach other states; to sample those states, run `leret sample` "
                "with a new run directory"
            )
        if self.n_final:
            yield f"{self.n_final:,} samples have only a final reward, which does not change"

    async def samples(self, progress: Progress) -> list[Sample]:
        changed: list[Sample] = []
        with self._resources:
            by_question = groupby(
                self._store.groups(), lambda group: (group.policy_digest, group.state.task_id)
            )
            for (policy, name), members in by_question:
                groups = list(members)
                task = self._tasks.get(name)
                if task is None:
                    raise RunError(
                        f"question {name} was sampled but is not in the run's data; fix data.questions"
                    )
                chosen = {visit.step: visit.chosen for visit in self._store.visits(policy, name)}
                scored = await self._scored(task, groups, chosen)
                for group in groups:
                    changed += self._group(task, group, chosen.get(group.state.step), scored)
                progress.advance(1)
        return changed

    async def _scored(
        self, task: Task, groups: Sequence[StateSamples], chosen: Mapping[int, str | None]
    ) -> dict[str, Sample]:
        """Return samples with new reward parts, by id.

        Replays the program if a reward reads unstored fields.
        """
        samples: list[Sample] = []
        for group in groups:
            samples += [sample for sample in group.samples if _is_scored(sample, by_end=False)]
        scored = {}
        if self._runner is None:
            try:
                for sample in samples:
                    scored[sample.id] = self._with_parts(task, sample, _Unfinished)
                return scored
            except _PredictionRead:
                searches = SearchBatcher(self._environment.retriever)
                self._resources.enter_context(closing(searches))
                self._runner = self._environment.runner(searches)
        ends = await _ends(self._runner, task, groups, chosen, self._crediting.step.depth)
        for sample in samples:
            make_outcome = partial(Outcome, **ends.get(sample.id, {}))
            scored[sample.id] = self._with_parts(task, sample, make_outcome)
        return scored

    def _group(
        self, task: Task, group: StateSamples, chosen: str | None, scored: Mapping[str, Sample]
    ) -> list[Sample]:
        self.n_final += sum(_is_scored(sample, by_end=True) for sample in group.samples)
        old = [sample for sample in group.samples if sample.id in scored]
        if not old:
            return []
        credit = credit_of(old[0])
        new = self._crediting.rewards([scored[sample.id] for sample in old], credit)
        if chosen is not None:
            by_id = {sample.id: sample for sample in new}
            samples = [by_id.get(sample.id, sample) for sample in group.samples]
            to_end = self._to_end or credit != "step"
            now = select_next(samples, task, self._seed, group.state.draw, through_solved=to_end)
            if now is not None and now.id != chosen:
                self.n_other_choices += 1
        self.n_states += 1
        self.n_samples += len(new)
        changed = []
        for sample, before in zip(new, old, strict=True):
            if sample.reward != before.reward:
                self.n_changed += 1
            if sample != before:
                changed.append(sample)
        return changed

    def _with_parts(
        self, task: Task, sample: Sample, make_outcome: Callable[..., Outcome]
    ) -> Sample:
        ranking = []
        for doc_id, score in zip(sample.doc_ids, sample.scores, strict=True):
            passage = Passage(doc_id, "", "", score)
            document = self._corpus.get(doc_id)
            if document:
                passage = passage._replace(
                    title=document.title, text=document.text, parent=document.parent
                )
            ranking.append(passage)
        outcome = make_outcome(
            task=task,
            text=sample.completion or "",
            outputs=dict(sample.outputs),
            ranking=tuple(ranking),
            n_steps=sample.step + 1,
        )
        components = values_of(self._functions, outcome)
        for name, value in sample.components.items():
            if name in _REST or name.startswith(PREFIX):
                components[name] = value
        return replace(sample, components=components)


def _is_scored(sample: Sample, by_end: bool) -> bool:
    if sample.reward is None or not sample.is_sampled:
        return False
    return (credit_of(sample) == "final") == by_end


async def _ends(
    runner: ProgramRunner,
    task: Task,
    groups: Sequence[StateSamples],
    chosen: Mapping[int, str | None],
    depth: int,
) -> dict[str, dict[str, Any]]:
    """Return deep rankings by sample id, and predictions where the program ended."""
    from leret.programs.needs import Finished
    from leret.rollouts.walk import Point, begin, walk

    ends: dict[str, dict[str, Any]] = {}
    left = iter(groups)

    async def visit(point: Point) -> Point | None:
        following = None
        group = next(left, None)
        for sample in () if group is None else group.samples:
            if sample.completion is None or sample.failure is not None:
                continue
            after = await point.after(runner, point.reach(runner, sample.completion))
            end: dict[str, Any] = {"deep": ()}
            if isinstance(after.need, Finished):
                end["prediction"] = after.need.prediction
            if depth:
                end["deep"] = await runner.deep_ids(after.need, sample.step + 1, depth)
            ends[sample.id] = end
            if sample.id == chosen.get(sample.step):
                following = after
        return following

    path = await walk(begin(runner, task), visit)
    if path.error is not None:
        raise path.error
    return ends
