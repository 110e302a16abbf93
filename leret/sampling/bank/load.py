"""The bank of a run: read where it is there, bootstrapped where it is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leret.core.errors import ConfigError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Outcome, Rollout, Task
from leret.datasets.splits import rank_of
from leret.policies.base import Policy
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.retrieval.batching import SearchBatcher
from leret.rewards import reward
from leret.sampling.plan import n_bank_questions
from leret.sampling.rollouts.environment import Environment
from leret.sampling.rollouts.rollout import RolloutRunner
from leret.sampling.rollouts.scheduler import refuse_unparsed

if TYPE_CHECKING:
    import dspy


_GOOD_SHARE = 0.25
"""The best quarter of the zero-shot runs: what a run must reach for its steps to become demos."""

_LEAST = 1e-9


async def prompts_of(
    run: Run, bench: Environment, policy: Policy, front: SearchBatcher, questions: Sequence[Task], progress: Progress
) -> list[Prompt]:
    """The prompts of a run, the zero-shot one first.

    Args:
        run: its bank is used where it has one, whatever policy made it.
        bench: program, adapter, retriever and settings.
        policy: completes.
        front: over the bench's retriever, on this event loop.
        questions: some of them, drawn by the seed, make and score the prompts.
        progress: hears of every run of the program.

    Raises:
        PolicyError, RetrievalError, ProgramError: the bank could not be made; or nothing was in the adapter's format.
        ConfigError: the directory of the user's own prompts holds none.
        RunError: the run's prompts were lost, or it cannot be written.
    """
    bank = run.manifest().get("bank")
    if bank is not None:
        return [Prompt.load(run.prompts / f"{name}.json") for name in bank["prompts"]]
    settings = bench.recipe.sampling
    if settings.prompts == 1:
        prompts = [ZERO_SHOT]
    elif settings.bank.path is not None:
        prompts = _given(Path(settings.bank.path), settings.prompts)
    else:
        prompts = await _bootstrapped(run, bench, policy, front, questions, progress)
    _keep(run, prompts, settings.prompts)
    return prompts


def _keep(run: Run, prompts: Sequence[Prompt], wanted: int) -> None:
    with run.writing():
        run.prompts.mkdir(parents=True, exist_ok=True)
        for path in run.prompts.glob("*.json"):
            path.unlink()  # of a bank that was cut off
        for prompt in prompts:
            prompt.save(run.prompts / f"{prompt.name}.json")
    scores = {prompt.name: prompt.score for prompt in prompts}
    run.update(bank={"prompts": [prompt.name for prompt in prompts], "scores": scores, "wanted": wanted})
    run.event("sample", "bank", prompts=len(prompts), wanted=wanted, scores=scores)


def _given(directory: Path, n: int) -> list[Prompt]:
    """Prompts that the user wrote: the first ones by file name, beside the zero-shot one."""
    loaded = [Prompt.load(path) for path in sorted(directory.glob("*.json"))]
    own = {prompt.digest: prompt for prompt in loaded if prompt.digest != ZERO_SHOT.digest}
    if not own:
        raise ConfigError(f"sampling.bank.path: {directory} holds no few-shot prompt (*.json, as in R/prompts)")
    numbered = enumerate(list(own.values())[: n - 1], 1)
    return [ZERO_SHOT, *(Prompt(str(i), p.demos, p.instructions, p.score) for i, p in numbered)]


async def _bootstrapped(
    run: Run, bench: Environment, policy: Policy, front: SearchBatcher, questions: Sequence[Task], progress: Progress
) -> list[Prompt]:
    from leret.policies.dspy_lm import policy_lm
    from leret.sampling.bank.lm import memory_of, remembering

    recipe, settings = bench.recipe, bench.recipe.sampling
    shuffled = sorted(questions, key=lambda question: (rank_of(question.id, settings.seed, "bank"), question.id))
    n_train, n_dev = n_bank_questions(len(shuffled), settings.bank.train_questions, settings.bank.dev_questions)
    train, dev = shuffled[:n_train], shuffled[n_train : n_train + n_dev]
    if not dev:
        raise RunError(
            f"{run.path}: the bank needs two questions at least; raise data.limit, or set sampling.prompts: 1"
        )
    progress.start("prompt bank", n_train + settings.bank.candidates * n_dev)
    rollouts = await _zero_shot(bench, policy, front, train, progress)
    unparsed = [rollout.failure for rollout in rollouts if rollout.failure and rollout.failure.kind == "parse"]
    if len(unparsed) == len(rollouts):
        refuse_unparsed(unparsed, len(unparsed), len(rollouts), settings.max_unparsed_rate)
    threshold = _threshold(bench, train, rollouts)
    asked = {"max_tokens": recipe.policy.max_tokens, "top_p": recipe.policy.top_p}
    cold, warm = (policy_lm(policy, temperature=t, **asked) for t in (0.0, settings.bank.temperature))
    teacher = remembering(memory_of(rollouts), lambda: warm, temperature=settings.bank.temperature, **asked)
    stop = threading.Event()
    work = asyncio.create_task(asyncio.to_thread(_build, bench, cold, teacher, train, dev, threshold, stop, progress))
    try:
        prompts = await asyncio.shield(work)
    finally:
        stop.set()  # the thread cannot be cancelled; its next run of the program ends it
        for lm in (cold, warm):
            lm.engine.close()  # and what it waits for now
        await asyncio.gather(work, return_exceptions=True)
        progress.finish()
    if len(prompts) < recipe.sampling.prompts:
        run.event("sample", "fewer prompts", prompts=len(prompts), wanted=settings.prompts, threshold=threshold)
    return prompts


async def _zero_shot(
    bench: Environment, policy: Policy, front: SearchBatcher, train: Sequence[Task], progress: Progress
) -> list[Rollout]:
    """The runs whose steps may become demos."""
    recipe, settings = bench.recipe, bench.recipe.sampling
    roller = RolloutRunner(
        bench.replay,
        bench.formatter,
        policy,
        front,
        max_tokens=recipe.policy.max_tokens,
        temperature=settings.bank.temperature,
        top_p=recipe.policy.top_p,
        seed=settings.seed,
    )
    return await roller.run(train, concurrency=settings.concurrency, on_done=lambda rollout: progress.advance(1))


def _threshold(bench: Environment, train: Sequence[Task], rollouts: Sequence[Rollout]) -> float:
    """The reward that the best quarter of zero-shot runs reaches; above 0."""
    value = reward(bench.recipe.sampling.reward)
    ended = [(q, rollout) for q, rollout in zip(train, rollouts, strict=True) if rollout.finished]
    rewards = sorted((value(Outcome(q, ranking=rollout.ranking)) or 0.0 for q, rollout in ended), reverse=True)
    good = rewards[: max(1, round(_GOOD_SHARE * len(rewards)))]
    return max(good[-1], _LEAST) if good else _LEAST


def _build(
    bench: Environment,
    cold: dspy.LM,
    teacher: dspy.LM,
    train: Sequence[Task],
    dev: Sequence[Task],
    threshold: float,
    stop: threading.Event,
    progress: Progress,
) -> list[Prompt]:
    """In a thread: DSPy's optimizers are not async."""
    from leret.sampling.bank.bank import BankPlan, build_bank

    settings = bench.recipe.sampling
    return build_bank(
        bench.program(),
        bench.adapter,
        cold,
        bench.retriever,
        reward(settings.reward),
        train,
        dev,
        BankPlan(settings.prompts, settings.bank.max_demos, settings.bank.candidates, threshold),
        teacher=teacher,
        on_scored=lambda: progress.advance(1),
        stop=stop,
    )
