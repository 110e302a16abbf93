"""Sampling of the student of a `LeReT.compile`: the prompt bank, the samples, and their spread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field

import dspy

from leret.core.errors import PolicyError
from leret.optimize.inputs import LMCallsSpent, counted_lm, greedy_lm
from leret.optimize.job import CompileJob, in_thread
from leret.programs.prompts import Prompt
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Reward, scoring
from leret.rollouts.actors import SamplingPlan
from leret.rollouts.failures import BOUNDARIES, SamplingStats
from leret.rollouts.states import with_credit
from leret.sampling.bank.bank import load_bank, save_bank
from leret.sampling.bank.bootstrap import BankPlan, bootstrap_prompts
from leret.sampling.stage import sample_tasks
from leret.sampling.store.store import StateSamples, Store


@dataclass
class StudentSamples:
    """Samples of a student.

    Attributes:
        groups: samples of the trained predictors by state.
        spread: number of sampled states, and of those with unequal rewards, by predictor.
        stopped: the error if ``max_lm_calls`` ended the sampling.
    """

    groups: list[StateSamples] = field(default_factory=list)
    spread: dict[str, tuple[int, int]] = field(default_factory=dict)
    stopped: LMCallsSpent | None = None


def sample_student(job: CompileJob) -> StudentSamples:
    """Sample the student on the trainset, into the run's store; the budget may end it early."""
    settings = job.settings
    before = job.budget.spent
    result = StudentSamples()
    job.budget.reserved = before * len(settings.algorithms)
    try:
        # replays call no callbacks
        with dspy.context(callbacks=[], _leret_spend=job.budget.spend):
            prompts = job.prompts
            if settings.prompts > len(prompts) == 1:
                reward = job.reward
                if settings.reward is None:
                    reward = job.final or reward
                prompts = _bank(job, reward)
            in_thread(asyncio.run, _sample(job, prompts))
    except LMCallsSpent as error:
        result.stopped = error
        job.log("sample", f"{error}; training uses the samples so far")
    finally:
        job.budget.reserved = 0
        job.progress.finish()
    with Store(job.run.store, read_only=True) as store:
        counts = store.counts()
        sampled = [group for group in store.groups() if group.samples[0].is_sampled]
    result.groups = [group for group in sampled if group.state.predictor in job.trained]
    result.spread = _spread(sampled)
    text = f"{counts['samples']} samples at {counts['states']} states"
    spread = {}
    for name, (n, n_spread) in result.spread.items():
        spread[name] = {"states": n, "with_spread": n_spread}
    job.log(
        "sample",
        f"{text} from {len(job.examples)} examples",
        lm_calls=job.budget.spent - before,
        predictors=spread,
        **counts,
    )
    for name, (n, n_spread) in result.spread.items():
        if not n_spread:
            text = f"the rewards are equal at each of {n} states"
            job.log("sample", f"{name} has no samples to train on: {text}")
    return result


def _spread(groups: Iterable[StateSamples]) -> dict[str, tuple[int, int]]:
    spread: dict[str, tuple[int, int]] = {}
    for group in groups:
        rewards = {sample.reward for sample in group.samples if sample.reward is not None}
        n, n_spread = spread.get(group.state.predictor, (0, 0))
        spread[group.state.predictor] = (n + 1, n_spread + (len(rewards) > 1))
    return spread


def _bank(job: CompileJob, reward: str | Reward) -> list[Prompt]:
    """Return the student's prompt and few-shot prompts.

    Half of the examples become demos, half are for scoring.
    """
    bank = load_bank(job.run)
    if bank is not None:
        return bank
    n_prompts = job.settings.prompts
    tasks = list(job.examples)
    lms = [predictor.lm for predictor in job.program.predictors()]
    job.progress.start("prompt bank", None)
    bank = bootstrap_prompts(
        job.program.deepcopy(),
        job.adapter,
        [greedy_lm(lm, job.budget) for lm in lms],
        job.retriever,
        scoring(reward),
        tasks[::2][:50],
        tasks[1::2][:50],
        BankPlan(n_prompts, 3, 8, None),
        teacher=[counted_lm(lm, job.budget) for lm in lms],
        on_scored=lambda: job.progress.advance(1),
    )
    save_bank(job.run, bank, n_prompts)
    scores = [prompt.score for prompt in bank]
    job.log("prompts", f"made {len(bank)} of {n_prompts} prompts", scores=scores)
    return bank


_UNUSED_REWARD = (
    "the reward is not used, only the metric: no search that leret sees (leret.Search, "
    "dspy.Retrieve, leret.search_tool) follows an LM call"
)


async def _sample(job: CompileJob, prompts: Sequence[Prompt]) -> None:
    settings = job.sampling
    plan = SamplingPlan.of(
        settings,
        job.role,
        prompts=tuple(prompts),
        n_samples=settings.samples,
        seed=settings.seed,
        temperature=1.0,
        top_p=1.0,
        max_tokens=64,
    )
    searches: AbstractContextManager[SearchBatcher | None] = nullcontext()
    if job.retriever is not None:
        searches = closing(SearchBatcher(job.retriever))
    job.progress.start("sampling", len(job.examples))
    lm = next(iter(job.trained.values()))
    with searches as search, Store(job.run.store) as store:
        program = job.program.deepcopy()
        read = lm.engine.reader(lm.model)
        runner = ProgramRunner.over(program.deepcopy(), job.adapter, search, job.rm, read)
        tasks = list(job.examples)
        plan = await with_credit(plan, runner, tasks, job.run)
        credits = {role.credit for role in plan.roles(runner).values() if role.sampled}
        if job.settings.reward and not job.settings.credit and credits == {"final"}:
            job.log("sample", _UNUSED_REWARD)
        stats = await sample_tasks(
            tasks, runner, program, plan, store, settings, progress=job.progress
        )
    for note in _notes(stats):
        job.log("sample", note, failures=dict(stats.failures))


def _notes(stats: SamplingStats) -> list[str]:
    """Return the notes on a sampling. After an outage, raise its error."""
    failure = stats.last_failure
    if failure is None:
        return list(stats.notes)
    n_outages = stats.failures["policy"] + stats.failures["retrieval"]
    if n_outages:
        boundary = BOUNDARIES.get(failure.kind, PolicyError)
        raise boundary(
            f"{n_outages} completions or searches failed; the last error: "
            f"{failure.message}. Fix the cause and compile again with the same run_dir "
            "to reuse the samples so far"
        ).failed()
    return [*stats.notes, f"failed: {failure.message}"]
