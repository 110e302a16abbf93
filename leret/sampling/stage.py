"""`leret sample`: a recipe and a run directory in; a bank, a store of samples and preferences out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError
from leret.core.progress import Progress, Silent
from leret.core.runs import Run
from leret.core.stages import completed, is_complete_parquet, mark_completed, stage_key
from leret.core.types import Task
from leret.policies.load import probe
from leret.rewards import reward
from leret.sampling.changes import recipe_stamps, refuse_changed_files, refuse_changes
from leret.sampling.preferences.dataset import PreferenceReport, build_preferences
from leret.sampling.rollouts.environment import Environment, located, questions_digest
from leret.sampling.store.merge import rescue
from leret.sampling.store.schema import OUTAGES
from leret.sampling.store.store import Store

if TYPE_CHECKING:
    from leret.core.usage import UsageByPrompt
    from leret.policies.base import Policy
    from leret.programs.prompts import Prompt
    from leret.retrieval.batching import SearchBatcher
    from leret.sampling.ray.scaleout import Cluster
    from leret.sampling.rollouts.scheduler import SamplingStats, Scheduler


@dataclass(frozen=True)
class SampleReport:
    """What the stage did, and what the run holds now for its policy.

    Attributes:
        already: everything was there, and nothing was done.
        new_questions: that this call sampled to an end.
        new_samples: that this call added.
        waiting: questions that met an outage; the same command goes on with them.
        prompts: of the bank, with their scores on its dev questions (None for those not scored).
        failures: samples of the run's policy without a reward, by kind.
        notes: what to look at, and what to do.
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
    prompts: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    notes: Sequence[str] = ()


def sample(
    recipe: SamplingRecipe,
    run: Run,
    *,
    base_dir: Path | None = None,
    progress: Progress | None = None,
    cluster: Cluster | None = None,
) -> SampleReport:
    """Sample a program's states with several prompts, score them, and make the preferences.

    Goes on where an earlier call was stopped; returns at once where nothing is left.

    Args:
        recipe: what to sample.
        run: a new one, or one that the same recipe began. The policy may be another one (the next round), the limit
            and the strategy of the pairs any.
        base_dir: where relative paths of the recipe start; None is the current directory.
        progress: hears of every question.
        cluster: samples on the workers of a Ray cluster; None samples in this process.

    Raises:
        RunError: the run was sampled from another recipe, is being sampled, or cannot be written.
        DataError, RetrievalError, PolicyError, ProgramError: what the recipe names cannot be opened, or too many
            samples failed or did not parse; what is done is kept.
        ConfigError: settings that cannot go together.
    """
    began = time.monotonic()
    progress = progress or Silent()
    recipe = located(recipe, base_dir or Path.cwd())
    reward(recipe.sampling.reward, "sampling.reward")
    if recipe.policy.temperature == 0 and recipe.sampling.samples > 1:
        raise ConfigError(
            f"sampling.samples is {recipe.sampling.samples}, but at policy.temperature 0 they would all be the same; "
            "raise the temperature, or set samples: 1"
        )
    key = stage_key(recipe, recipe_stamps(recipe))
    before = completed(run.path, "sample", key)
    if before is not None and is_complete_parquet(run.preferences / "train.parquet"):
        return SampleReport(
            **{**before, "already": True, "new_questions": 0, "new_samples": 0, "seconds": time.monotonic() - began}
        )
    refuse_changes(run, recipe, {})
    asyncio.run(probe(recipe.policy))
    with Environment(recipe, run.cache, progress) as bench, cluster or nullcontext():
        progress.start("data and index", None)
        refuse_changed_files(run, bench)
        questions = _questions(bench)
        digests = _digests(bench, questions)
        progress.finish()
        refuse_changes(run, recipe, {"retriever": digests["retriever"]})
        if bench.skipped:
            run.event("sample", "skipped", **bench.skipped)
        report = _sample(bench, run, questions, digests, progress, began, cluster)
    if not report.waiting and not any(report.failures.get(kind) for kind in OUTAGES):
        mark_completed(run.path, "sample", key, asdict(report), [run.store])
    return report


def _sample(
    bench: Environment,
    run: Run,
    questions: Sequence[Task],
    digests: dict[str, str],
    progress: Progress,
    began: float,
    cluster: Cluster | None,
) -> SampleReport:
    from leret.policies.load import policy_of
    from leret.sampling.rollouts.scheduler import refuse_unparsed

    recipe = bench.recipe
    with Store(run.store) as store:  # opened first: it keeps a second process out
        rescue(run.workers, store)
        policy = policy_of(recipe.policy)
        _write_sections(run, bench, policy, digests)
        run.event("sample", "started", questions=len(questions), policy=policy.name, policy_digest=policy.digest)
        n_before = store.counts(policy.digest)["samples"]
        prompts, tally, stops = asyncio.run(_work(bench, run, policy, store, questions, progress, cluster is None))
        if cluster is not None:
            tally = cluster.sample(bench, run, policy, prompts, store, questions, digests, progress)
        counts = store.counts(policy.digest)
        failures = (sample.failure for group in store.groups(policy.digest) for sample in group.samples)
        unparsed = (failure for failure in failures if failure is not None and failure.kind == "parse")
        refuse_unparsed(unparsed, counts.get("failed_parse", 0), counts["samples"], recipe.sampling.max_unparsed_rate)
        pairs = build_preferences(
            run, recipe.sampling.strategy, recipe.sampling.margin, recipe.sampling.max_pairs, policy.digest
        )
    report = _report(policy, questions, prompts, tally, counts, n_before, pairs, time.monotonic() - began)
    notes = [*stops, *bench.notes(), *_notes(prompts, recipe.sampling.prompts, pairs)]
    report = replace(report, notes=notes)
    run.event("sample", "finished", **asdict(report))
    return report


async def _work(
    bench: Environment,
    run: Run,
    policy: Policy,
    store: Store,
    questions: Sequence[Task],
    progress: Progress,
    here: bool,
) -> tuple[list[Prompt], SamplingStats, tuple[str, ...]]:
    """The bank, the samples where sampling is done ``here``, and where `check_messages` had to stop."""
    from leret.core.usage import UsageByPrompt, UsageEvents
    from leret.programs.checks import check_messages
    from leret.retrieval.batching import SearchBatcher
    from leret.sampling.bank.bank import load_or_build_bank
    from leret.sampling.rollouts.scheduler import SamplingStats

    front = SearchBatcher(bench.retriever)
    try:
        prompts = await load_or_build_bank(run, bench, policy, front, questions, progress)
        _, stops = await check_messages(bench.program(), bench.runner(front), prompts, questions[:20])
        if not here:
            return prompts, SamplingStats(), stops
        settings = bench.recipe.sampling
        ledger = UsageByPrompt(bench.recipe.policy.price_prompt, bench.recipe.policy.price_completion)
        accounting = UsageEvents(run, ledger, policy, front)
        scheduler = scheduler_of(
            bench, policy, prompts, front, store, ledger, max_error_rate=settings.max_error_rate, facts=accounting.facts
        )
        done = store.done(policy.digest)
        progress.start("sampling", sum(question.id not in done for question in questions))
        try:
            async with accounting:
                return prompts, await scheduler.run(questions, settings.concurrency, progress), stops
        finally:
            progress.finish()
    finally:
        front.close()
        await policy.aclose()


def scheduler_of(
    bench: Environment,
    policy: Policy,
    prompts: Sequence[Prompt],
    front: SearchBatcher,
    store: Store,
    ledger: UsageByPrompt,
    *,
    max_error_rate: float | None,
    facts: Callable[[], Mapping[str, float | int | str]] = dict,
) -> Scheduler:
    """What samples a recipe's questions into a store, on one event loop.

    Args:
        bench: the recipe, opened.
        policy: completes.
        prompts: the bank.
        front: over the bench's retriever.
        store: where the samples go.
        ledger: counts calls and tokens.
        max_error_rate: see `Scheduler`.
        facts: see `Scheduler`.
    """
    from leret.sampling.rollouts.branching import SamplingPlan, StateSampler
    from leret.sampling.rollouts.scheduler import Scheduler

    lm, settings = bench.recipe.policy, bench.recipe.sampling
    runner = bench.runner(front)
    branch = SamplingPlan(
        tuple(prompts), settings.samples, settings.seed, lm.temperature, lm.top_p, lm.max_tokens, settings.reward
    )
    brancher = StateSampler(runner, policy, store, branch, ledger)
    return Scheduler(
        runner,
        brancher,
        store,
        policy.digest,
        seed=settings.seed,
        max_error_rate=max_error_rate,
        max_unparsed_rate=settings.max_unparsed_rate,
        facts=facts,
    )


def _questions(bench: Environment) -> list[Task]:
    data = bench.recipe.data
    questions = bench.questions(data.split, data.limit)
    usable = [question for question in questions if question.gold]
    if not usable:
        raise DataError(
            f"data: no question of split {data.split} names its relevant documents, so no ranking can be scored "
            f"({len(questions)} questions read); name another split or file"
        )
    return usable


def _digests(bench: Environment, questions: Sequence[Task]) -> dict[str, str]:
    return {
        "corpus": bench.corpus.digest,
        "retriever": bench.retriever.digest,
        "program": bench.program_digest,
        "questions": questions_digest(questions),
    }


def _write_sections(run: Run, bench: Environment, policy: Policy, digests: dict[str, str]) -> None:
    """The recipe, as later stages read it. Its policy stays the one of the first round: the base of all others."""
    manifest = run.manifest()
    section: dict[str, Any] = bench.recipe.model_dump(mode="json")
    rounds: list[dict[str, str]] = manifest.get("rounds", [])
    if rounds and rounds[0]["digest"] != policy.digest:
        section["policy"] = manifest["sampling"]["policy"]
    if all(entry["digest"] != policy.digest for entry in rounds):
        rounds = [*rounds, {"policy": policy.name, "model": bench.recipe.policy.model, "digest": policy.digest}]
    run.update(
        sampling=section, digests={**manifest.get("digests", {}), **digests, "policy": policy.digest}, rounds=rounds
    )


def _notes(prompts: Sequence[Prompt], wanted: int, pairs: PreferenceReport) -> Iterator[str]:
    if len(prompts) == 1 < wanted:
        yield f"no candidate of the prompt bank reached reward > 0: the zero-shot prompt alone, instead of {wanted}"
    elif len(prompts) < wanted:
        yield f"{len(prompts)} prompts instead of {wanted}: the bank found no others"
    if 2 * pairs.no_spread > pairs.states:
        which = f"at {pairs.no_spread:,} of {pairs.states:,} states they have one reward"
        yield f"the samples hardly differ: {which}; raise policy.temperature or sampling.samples"
    if pairs.failures["prompt"]:
        yield f"{pairs.failures['prompt']:,} of {pairs.samples:,} samples failed: their prompts do not fit the policy"


def _report(
    policy: Policy,
    questions: Sequence[Task],
    prompts: Sequence[Prompt],
    tally: SamplingStats,
    counts: dict[str, int],
    n_before: int,
    pairs: PreferenceReport,
    seconds: float,
) -> SampleReport:
    return SampleReport(
        already=False,
        policy=policy.name,
        questions=len(questions),
        new_questions=tally.questions - tally.waiting,
        new_samples=counts["samples"] - n_before,
        waiting=tally.waiting,
        states=counts["states"],
        samples=counts["samples"],
        mean_reward=pairs.mean_reward,
        pairs=pairs.pairs,
        no_spread=pairs.no_spread,
        prompts={prompt.name: prompt.score for prompt in prompts},
        failures={name.removeprefix("failed_"): n for name, n in counts.items() if name.startswith("failed_")},
        seconds=round(seconds, 3),
    )
