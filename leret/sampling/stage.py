"""`leret sample`: sample a program's states with several prompts, score the samples, and build preference pairs.

`sample_tasks` works on objects (tasks, runner, program, plan, store). `sample` creates these
objects from a recipe and also makes the prompt bank, the preferences and the report of a run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy
from filelock import AsyncFileLock, FileLock

from leret.config.base import resolve_paths
from leret.config.policy import PickerSettings
from leret.config.sampling import SamplingRecipe, SamplingSettings
from leret.core.errors import ConfigError, RunError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.runs import Run, machine
from leret.core.stages import (
    completed,
    input_stamps,
    mark_completed,
    stage_key,
)
from leret.core.types import OUTAGES, Failure, Task
from leret.http.usage import Usage, UsageEvents
from leret.policies.base import Policy
from leret.policies.load import PolicySet, open_policies, policy_for, probe, sampled_policy
from leret.policies.local.chat_template import dated
from leret.policies.local.policy import LocalPolicy
from leret.programs.checks import check_path
from leret.programs.needs import NeedsCompletion, Step
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.environment import (
    Environment,
    questions_digest,
    recipe_files,
    refuse_changed_files,
    refuse_changes,
    scorable,
)
from leret.rollouts.failures import SamplingStats, cut_notes, refuse_unparsed
from leret.rollouts.states import StateSampler, with_credit
from leret.sampling.bank.bank import load_or_build_bank
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.preferences.report import PreferenceReport
from leret.sampling.scheduler import Scheduler
from leret.sampling.store.merge import merge_shards
from leret.sampling.store.store import Store

Distribute = Callable[[SamplingRecipe, Run, str, Sequence[Task], Progress], "SamplingStats"]
"""Function that samples tasks into R/shards in other processes: (recipe, run, policy digest, tasks, progress)."""


_LEAST_SHARE = 0.1
"""Share of states with spread below which training hardly learns: `leret.training.watch`'s limit."""
_LEAST_SPREAD = 16
"""States with spread below which training on stored samples has less than a batch of pairs."""


@dataclass(frozen=True)
class SampleReport:
    """Results of `sample`, and counts of the run's samples from the current policy.

    Attributes:
        already: True if the stage was already complete and nothing was done.
        questions: questions to sample; this call finished ``new_questions`` of them.
        waiting: questions that an outage stopped; the same command continues them.
        cut: completions of finished questions that ``max_tokens`` cut.
        prompts: dev score per prompt of the bank (None if not scored).
        failures: number of failed samples by kind.
    """

    already: bool
    policy: str
    questions: int
    new_questions: int
    new_samples: int
    waiting: int
    states: int
    samples: int
    mean_reward: float
    pairs: int
    no_spread: int
    cut: int = 0
    prompts: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    notes: Sequence[str] = ()


async def sample_tasks(
    tasks: Sequence[Task],
    runner: ProgramRunner,
    program: dspy.Module,
    plan: SamplingPlan,
    store: Store,
    settings: SamplingSettings,
    *,
    usage: Usage | None = None,
    progress: Progress | None = None,
    usage_now: Callable[[], Mapping[str, float | int | str]] = dict,
) -> SamplingStats:
    """Sample every task to the end of its path, into a store; stored samples are not repeated.

    ``program`` is an instance of the runner's program that nothing else uses; the first tasks' paths
    are checked on it. The searches of ``runner`` must use the running event loop.

    Raises LeretError if too many samples fail or the program cannot be replayed; finished samples
    are kept.
    """
    # The first task checks all prompts, later ones only the first prompt.
    unchecked = iter([plan.prompts])

    def check(task: Task, steps: Sequence[Step], results: SearchResults) -> Awaitable[None]:
        prompts = next(unchecked, plan.prompts[:1])
        return check_path(program, runner, task, steps, results, prompts)

    scheduler = Scheduler(
        runner,
        StateSampler(runner, store, plan, usage),
        store,
        plan.seed,
        settings.max_error_rate,
        settings.max_unparsed_rate,
        check,
        usage_now,
    )
    stats = await scheduler.run(tasks, settings.concurrency, progress)
    stats.notes += _credit_notes(plan, runner)
    if plan.hints is not None:
        stats.notes.append(plan.hints.note())
    return stats


def _credit_notes(plan: SamplingPlan, runner: ProgramRunner) -> Iterator[str]:
    """Yield notes on predictors that credit ``auto`` does not sample, or scores by ``both``."""
    for name, role in plan.roles(runner).items():
        setting = plan.role(runner.formatter.need(name, {}))
        if setting.sampled and not role.sampled:
            yield (
                f"{name} is not sampled: no search follows it before the next LM call, and there is "
                "no final reward; to sample it, set sampling.credit: final"
            )
        elif role.credit == "both" != setting.credit:
            yield (
                f"{name} decides when the program stops, so its credit is both: step alone would ignore the "
                "results of later searches. To choose another credit, set sampling.credit"
            )


def sample(
    recipe: SamplingRecipe,
    run: Run,
    *,
    base_dir: Path | None = None,
    progress: Progress | None = None,
    distribute: Distribute | None = None,
) -> SampleReport:
    """Sample a program's states with several prompts, score the samples, and build the preferences.

    Continues an interrupted call with the same recipe, in which only `Free` keys and the policy may
    differ. Shards that were sampled separately are merged first. ``distribute`` samples in other
    processes.

    Raises:
        LeretError: the run was sampled with another recipe, is being sampled or cannot be written;
            files or models of the recipe cannot be opened; too many samples failed or did not
            parse. Finished samples are kept.
    """
    began = time.monotonic()
    progress = progress or Progress()
    recipe = resolve_paths(recipe, base_dir or Path.cwd())
    files = recipe_files(recipe)
    stamps = input_stamps(*files)
    key = stage_key(recipe, stamps)
    before = completed(run.path, "sample", key)
    if before is not None and _has_results(run):
        now = {"already": True, "new_questions": 0, "new_samples": 0}
        return SampleReport(**{**before, **now, "seconds": time.monotonic() - began})
    with (
        open_recipe(recipe, run, progress) as (environment, tasks, digests),
        Store(run.store) as store,
    ):
        merge_shards(run, store=store)
        policy = begin(run, environment, tasks, digests)
        n_before = store.counts(policy.digest)["samples"]
        only = None if distribute is None else ()
        bank, stats, notes = asyncio.run(
            sample_session(environment, run, policy, store, tasks, progress, only=only)
        )
        if distribute is not None:
            stats = distribute(recipe, run, policy.digest, tasks, progress)
            merge_shards(run, store=store)
        report = _report(recipe, run, policy, store, stats, bank, notes)
    seconds = round(time.monotonic() - began, 3)
    report = replace(
        report, questions=len(tasks), new_samples=report.samples - n_before, seconds=seconds
    )
    run.event("sample", "finished", **asdict(report))
    had_outage = any(report.failures.get(kind) for kind in OUTAGES)
    if not report.waiting and not had_outage:
        inputs = dict(zip(files, stamps, strict=True))
        mark_completed(run.path, "sample", key, asdict(report), [run.store], inputs)
    return report


def _has_results(run: Run) -> bool:
    return run.held_out.is_file() and (run.preferences / "train.parquet").is_file()


@contextmanager
def open_recipe(
    recipe: SamplingRecipe, run: Run, progress: Progress
) -> Iterator[tuple[Environment, list[Task], dict[str, str]]]:
    """Yield a recipe's environment, tasks and digests, checked against the run.

    Processes take turns at the index.
    """
    if recipe.policy.temperature == 0 and recipe.sampling.samples > 1:
        raise ConfigError(
            f"sampling.samples is {recipe.sampling.samples}, but all samples are identical at policy.temperature 0; "
            "raise policy.temperature, or set sampling.samples: 1"
        )
    refuse_changes(run, recipe, {})
    for settings in recipe.by_predictor.values():
        asyncio.run(probe(settings))
    with dated(run.manifest.date), Environment(recipe, run.cache, progress) as environment:
        environment.check_policies(recipe.policies)
        progress.start("data and index", None)
        refuse_changed_files(run, environment)
        questions = environment.tasks(recipe.data.split, recipe.data.limit, recipe.data.part)
        digests = {}
        with FileLock(run.setup_lock):
            digests["corpus"] = environment.corpus.digest
            digests["retriever"] = environment.retriever.digest
        digests["program"] = environment.program_digest
        digests["questions"] = questions_digest(questions)
        if environment.reward_digest is not None:
            digests["reward"] = environment.reward_digest
        if environment.reader_digest is not None:
            digests["reader"] = environment.reader_digest
        progress.finish()
        refuse_changes(run, recipe, {"retriever": digests["retriever"]})
        if environment.skipped:
            run.event("sample", "skipped", **environment.skipped)
        yield environment, scorable(questions, recipe), digests


def begin(
    run: Run,
    environment: Environment,
    tasks: Sequence[Task],
    digests: Mapping[str, str],
    policy_digest: str | None = None,
) -> Policy:
    """Open the policy, which must have ``policy_digest`` if set, and write run.yaml."""
    recipe = environment.recipe
    policy = open_policies(recipe.by_predictor, sampled_policy)
    for name, settings in recipe.by_predictor.items():
        actor = policy_for(policy, name)
        if settings.temperature > 0 and isinstance(actor, LocalPolicy):
            actor.model.check_trainable()
    if policy_digest not in {None, policy.digest}:
        raise RunError(
            f"policy.model: {recipe.policy.model} changed since sampling began; "
            "restore it on all machines"
        )
    with FileLock(run.setup_lock):
        manifest = run.manifest
        section: dict[str, Any] = recipe.model_dump(mode="json")
        rounds = manifest.rounds
        if rounds and rounds[0]["digest"] != policy.digest:
            before = manifest.sampling or {}
            for name in ("policy", "policies"):
                section[name] = before.get(name, {})
        if all(earlier["digest"] != policy.digest for earlier in rounds):
            rounds = [*rounds, _round(recipe, policy)]
        run_digests = {**manifest.digests, **digests, "policy": policy.digest}
        with run.writing():
            write_atomically(run.held_out, json.dumps(sorted(environment.held_out), indent=0))
        run.update(sampling=section, digests=run_digests, rounds=rounds, machine=machine())
    run.event(
        "sample", "started", questions=len(tasks), policy=policy.name, policy_digest=policy.digest
    )
    return policy


def _round(recipe: SamplingRecipe, policy: Policy) -> dict[str, Any]:
    """Return a policy's record in the rounds of run.yaml."""
    record: dict[str, Any] = {
        "policy": policy.name,
        "model": recipe.policy.model,
        "digest": policy.digest,
    }
    if isinstance(policy, PolicySet):
        record["digests"] = policy.digests
        record["models"] = {name: settings.model for name, settings in recipe.by_predictor.items()}
    if recipe.data.part:
        record["part"] = recipe.data.part
    return record


async def sample_session(
    environment: Environment,
    run: Run,
    policy: Policy,
    store: Store,
    tasks: Sequence[Task],
    progress: Progress,
    *,
    only: Sequence[Task] | None = None,
) -> tuple[list[Prompt], SamplingStats, list[str]]:
    """Make the bank, sample ``tasks`` (or ``only`` those), and return prompts, stats and notes."""
    lm = environment.recipe.policy
    settings = environment.recipe.sampling
    search = SearchBatcher(environment.retriever)
    runner = environment.runner(search)
    try:
        async with AsyncFileLock(run.setup_lock, run_in_executor=False):
            plan = sampling_plan(environment.recipe, policy)
            prompts = await load_or_build_bank(run, environment, policy, search, tasks, progress)
            plan = with_bank(plan, prompts, environment)
            plan = await with_credit(plan, runner, tasks, run)
        notes = environment.notes()
        sampled = tasks if only is None else only
        if not sampled:
            return prompts, SamplingStats(), notes
        usage = Usage(lm.price_prompt, lm.price_completion)
        events = UsageEvents(run, usage, policy, search.counts)
        done = store.done(policy.digest)
        progress.start("sampling", sum(task.id not in done for task in sampled))
        async with events:
            stats = await sample_tasks(
                sampled,
                runner,
                environment.program(),
                plan,
                store,
                settings,
                usage=usage,
                progress=progress,
                usage_now=events.facts,
            )
        return prompts, stats, notes
    finally:
        progress.finish()
        search.close()
        await policy.aclose()


def sampling_plan(recipe: SamplingRecipe, policy: Policy) -> SamplingPlan:
    """Return a recipe's plan with the zero-shot prompt and undetermined credit."""
    lm = recipe.policy
    settings = recipe.sampling
    return SamplingPlan.of(
        settings,
        lambda need: _role(recipe, policy, need),
        prompts=(ZERO_SHOT,),
        n_samples=settings.samples,
        seed=settings.seed,
        temperature=lm.temperature,
        top_p=lm.top_p,
        max_tokens=lm.max_tokens,
        token_ids=settings.token_ids,
    )


def with_bank(
    plan: SamplingPlan, prompts: Sequence[Prompt], environment: Environment
) -> SamplingPlan:
    """Return a plan with the prompts of a bank, and with hints if one of them shows a hint."""
    hints = environment.hints() if any(prompt.hint for prompt in prompts) else None
    return replace(plan, prompts=tuple(prompts), hints=hints)


def _role(recipe: SamplingRecipe, policy: Policy, need: NeedsCompletion) -> Role:
    decoding = recipe.decoding_of(need.predictor)
    return Role(policy, decoding.get("temperature") != 0, recipe.sampling.credit, **decoding)


def _report(
    recipe: SamplingRecipe,
    run: Run,
    policy: Policy,
    store: Store,
    stats: SamplingStats,
    bank: Sequence[Prompt],
    notes: list[str],
) -> SampleReport:
    settings = recipe.sampling
    counts = store.counts(policy.digest)
    refuse_unparsed(
        _unparsed(store, policy),
        counts.get("failed_parse", 0),
        counts["samples"],
        settings.max_unparsed_rate,
    )
    failures = {}
    for name, n in counts.items():
        if name.startswith("failed_"):
            failures[name.removeprefix("failed_")] = n
    pairs = build_preferences(
        run, settings.strategy, settings.margin, settings.max_pairs, policy.digest
    )
    return SampleReport(
        already=False,
        policy=policy.name,
        questions=0,
        new_questions=stats.questions - stats.waiting,
        new_samples=0,
        waiting=stats.waiting,
        states=counts["states"],
        samples=counts["samples"],
        mean_reward=pairs.mean_reward,
        pairs=pairs.pairs,
        no_spread=pairs.no_spread,
        cut=pairs.cut,
        prompts={prompt.name: prompt.score for prompt in bank},
        failures=failures,
        notes=[*notes, *stats.notes, *_notes(len(bank), recipe, pairs)],
    )


def _unparsed(store: Store, policy: Policy) -> Iterator[Failure]:
    for group in store.groups(policy.digest):
        for sample in group.samples:
            if sample.failure is not None and sample.failure.kind == "parse":
                yield sample.failure


def _only_pickers(recipe: SamplingRecipe) -> bool:
    """Return True if the run samples only pickers, which are trained on new samples."""
    return all(isinstance(settings, PickerSettings) for settings in recipe.by_predictor.values())


def _notes(n_prompts: int, recipe: SamplingRecipe, pairs: PreferenceReport) -> Iterator[str]:
    wanted = recipe.sampling.prompts
    if n_prompts < wanted:
        why = "other candidates were duplicates"
        if n_prompts == 1:
            why = "no run for making demos had a reward above 0"
        yield f"the prompt bank has {n_prompts} instead of {wanted} prompts: {why}"
    n_spread = pairs.states - pairs.no_spread - pairs.unscored
    too_few = not _only_pickers(recipe) and n_spread < _LEAST_SPREAD and n_spread < pairs.states / 2
    if pairs.states and (n_spread < _LEAST_SHARE * pairs.states or too_few):
        yield (
            f"only {n_spread:,} of {pairs.states:,} states have samples with different rewards, and training learns "
            "from these alone; raise policy.temperature, sampling.samples or data.limit"
        )
    yield from cut_notes(pairs.cut, pairs.samples)
    if pairs.failures["prompt"]:
        yield f"{pairs.failures['prompt']:,} of {pairs.samples:,} samples failed: prompts are too long for the policy"
