"""The prompt bank of a run: few-shot prompts for a program, bootstrapped from its policy's best rollouts.

Different prompts diversify samples more than temperature does. Source: LeReT, section 4.1.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leret.config.sampling import SamplingSettings
from leret.core.errors import ConfigError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Outcome, Rollout, Task
from leret.datasets.splits import rank_of
from leret.policies.base import Policy
from leret.policies.dspy_lm import policy_lm
from leret.policies.load import policy_for
from leret.programs.pick import named_picks
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Reward, scoring
from leret.rollouts.actors import Decoding, PolicyActor
from leret.rollouts.environment import Environment
from leret.rollouts.failures import refuse_unparsed
from leret.rollouts.walk import RolloutRunner
from leret.sampling.bank.bootstrap import (
    BankPlan,
    best_quarter,
    bootstrap_prompts,
    cached_completion_lm,
)

_FIRST = 16  # questions that are tried first: if no completion parses, the others are not
_MOST_CANDIDATES = 8


async def load_or_build_bank(
    run: Run,
    environment: Environment,
    policy: Policy,
    searches: SearchBatcher,
    tasks: Sequence[Task],
    progress: Progress,
) -> list[Prompt]:
    """Return the run's prompts, zero-shot prompt first.

    An existing bank is used even if the policy has changed.
    """
    bank = load_bank(run)
    if bank is not None:
        return bank
    settings = environment.recipe.sampling
    if settings.n_few_shot == 0 or not environment.replay.predictors:  # picks have no demos
        prompts = [ZERO_SHOT]
    elif settings.bank.path is not None:
        prompts = _read_prompts(Path(settings.bank.path), settings.n_few_shot)
        for prompt in prompts:
            prompt.check_predictors(environment.replay.names, "sampling.bank.path")
    else:
        prompts = await _bootstrapped(run, environment, policy, searches, tasks, progress)
    if settings.hint is not None:
        prompts = with_hint(prompts, settings.hint)
    save_bank(run, prompts, settings.prompts)
    return prompts


def with_hint(prompts: Sequence[Prompt], hint: str) -> list[Prompt]:
    """Return a bank whose few-shot prompts show a hint, with one more that shows only the hint."""
    hinted = [replace(prompt, hint=hint) for prompt in prompts[1:]]
    return [prompts[0], *hinted, Prompt(str(len(prompts)), hint=hint)]


def load_bank(run: Run) -> list[Prompt] | None:
    """Read the run's prompts; None if the run has no bank yet."""
    bank = run.manifest.bank
    if bank is None:
        return None
    return [Prompt.load(run.prompts / f"{name}.json") for name in bank["prompts"]]


def save_bank(run: Run, prompts: Sequence[Prompt], wanted: int) -> None:
    """Write the run's bank; ``wanted`` is the requested number of prompts."""
    with run.writing():
        run.prompts.mkdir(parents=True, exist_ok=True)
        for path in run.prompts.glob("*.json"):
            path.unlink()  # left by an interrupted call
        for prompt in prompts:
            prompt.save(run.prompts / f"{prompt.name}.json")
    scores = {prompt.name: prompt.score for prompt in prompts}
    run.update(bank={"prompts": list(scores), "scores": scores, "wanted": wanted})
    run.event("sample", "bank", prompts=len(prompts), wanted=wanted, scores=scores)


def n_candidates(settings: SamplingSettings, n_questions: int) -> int:
    """Return how many candidates the bank of a run of ``n_questions`` scores.

    Without ``bank.candidates``, the bank takes about a third of the run's LM calls at most, and has
    at least one candidate for each few-shot prompt.
    """
    if settings.bank.candidates is not None:
        return settings.bank.candidates
    bank = settings.bank
    n_train, n_dev = n_bank_questions(n_questions, bank.train_questions, bank.dev_questions)
    n_samples = n_questions * settings.prompts * settings.samples
    affordable = (n_samples // 2 - n_train) // max(1, n_dev)
    return max(1, settings.n_few_shot, min(_MOST_CANDIDATES, affordable))


def n_bank_questions(n_questions: int, n_train: int, n_dev: int) -> tuple[int, int]:
    """Return how many questions are for making the bank's demos, and for scoring its candidates."""
    if n_questions >= n_train + n_dev:
        return n_train, n_dev
    share = max(n_questions * n_train // (n_train + n_dev), min(1, n_questions))
    return share, n_questions - share


def _read_prompts(directory: Path, n: int) -> list[Prompt]:
    unique = {ZERO_SHOT.digest: ZERO_SHOT}
    for path in sorted(directory.glob("*.json")):
        prompt = replace(Prompt.load(path), hint=None)
        unique[prompt.digest] = prompt
    if len(unique) == 1:
        raise ConfigError(
            f"sampling.bank.path: {directory} has no few-shot prompts (*.json); set it to R/prompts"
        )
    prompts = list(unique.values())[: n + 1]
    return [replace(prompt, name=str(i)) for i, prompt in enumerate(prompts)]


async def _bootstrapped(
    run: Run,
    environment: Environment,
    policy: Policy,
    searches: SearchBatcher,
    tasks: Sequence[Task],
    progress: Progress,
) -> list[Prompt]:
    recipe = environment.recipe
    settings = recipe.sampling
    train, dev = _drawn(run, environment, tasks)
    candidates = n_candidates(settings, len(tasks))
    progress.start("prompt bank", len(train) + candidates * len(dev))
    rollouts = await _zero_shot(environment, policy, searches, train, progress)
    reward = scoring(settings.whole_reward)
    threshold = best_quarter(_rewards(train, rollouts, reward))
    cold: dict[str, Any] = {
        "max_tokens": recipe.policy.max_tokens,
        "top_p": recipe.policy.top_p,
        "temperature": 0.0,
    }
    warm = {**cold, "temperature": settings.bank.temperature}
    policies = [policy_for(policy, name) for name in environment.replay.predictors]
    cold_lms = [policy_lm(actor, **cold) for actor in policies]
    warm_lms = [policy_lm(actor, **warm) for actor in policies]
    read = environment.replay.read
    teacher = [cached_completion_lm(rollouts, lm, read, **warm) for lm in warm_lms]
    stop = threading.Event()
    plan = BankPlan(settings.n_few_shot + 1, settings.bank.max_demos, candidates, threshold)
    program = environment.program()
    for name, pick in named_picks(program).items():
        pick.actor = policy_for(policy, name)
    thread = asyncio.to_thread(
        bootstrap_prompts,
        program,
        environment.adapter,
        cold_lms,
        environment.retriever,
        reward,
        train,
        dev,
        plan,
        teacher=teacher,
        on_scored=lambda: progress.advance(1),
        stop=stop,
    )
    work = asyncio.create_task(thread)
    try:
        return await asyncio.shield(work)
    finally:
        stop.set()  # DSPy's thread cannot be cancelled; it ends when it next runs the program
        for lm in (*cold_lms, *warm_lms):
            lm.engine.close()  # ends the calls that DSPy's thread waits for
        await asyncio.gather(work, return_exceptions=True)
        progress.finish()


def _rewards(tasks: Sequence[Task], rollouts: Sequence[Rollout], reward: Reward) -> Iterator[float]:
    for task, rollout in zip(tasks, rollouts, strict=True):
        if rollout.failure is None:
            outcome = Outcome(
                task,
                ranking=rollout.ranking,
                prediction=rollout.prediction,
                n_steps=len(rollout.steps),
            )
            yield reward(outcome) or 0.0


def _drawn(
    run: Run, environment: Environment, tasks: Sequence[Task]
) -> tuple[list[Task], list[Task]]:
    settings = environment.recipe.sampling
    shuffled = sorted(tasks, key=lambda task: (rank_of(task.id, settings.seed, "bank"), task.id))
    bank = settings.bank
    n_train, n_dev = n_bank_questions(len(shuffled), bank.train_questions, bank.dev_questions)
    if not n_dev:
        raise RunError(
            f"{run.path}: the prompt bank needs two or more questions; raise data.limit, or set sampling.prompts: 1"
        )
    return shuffled[:n_train], shuffled[n_train : n_train + n_dev]


async def _zero_shot(
    environment: Environment,
    policy: Policy,
    searches: SearchBatcher,
    train: Sequence[Task],
    progress: Progress,
) -> list[Rollout]:
    lm = environment.recipe.policy
    settings = environment.recipe.sampling
    decoding = Decoding(lm.max_tokens, settings.bank.temperature, lm.top_p, settings.seed)
    actor = PolicyActor(policy, environment.formatter, decoding)
    runner = RolloutRunner(environment.runner(searches), actor)
    rollouts: list[Rollout] = []
    for part in (train[:_FIRST], train[_FIRST:]):
        rollouts += await runner.run(
            part, concurrency=settings.concurrency, on_done=lambda rollout: progress.advance(1)
        )
        unparsed = [rollout.failure for rollout in rollouts if rollout.failure and rollout.unparsed]
        if len(unparsed) == len(rollouts):
            refuse_unparsed(unparsed, len(unparsed), len(rollouts), settings.max_unparsed_rate)
    return rollouts
