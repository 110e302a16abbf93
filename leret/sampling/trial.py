"""A trial of formats: a few questions with each adapter, to find the format in which a language model searches best.

Most models of less than a few billion parameters do not write DSPy's formats unaided. That a
completion parses is not
enough: the reward of the first search decides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from leret.config.base import resolve_paths
from leret.config.sampling import AdapterSettings, SamplingRecipe
from leret.core.aio import gathered
from leret.core.errors import ConfigError, PolicyError
from leret.core.progress import Progress
from leret.core.types import Sample, Task
from leret.policies.base import Policy
from leret.policies.load import open_policies, probe, sampled_policy
from leret.programs.adapters import make_adapter
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.environment import Environment, scorable
from leret.rollouts.failures import BOUNDARIES
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import begin

N_FIRST = 6  # questions per format
N_FINAL = 30  # questions of the best formats
N_BEST = 2  # number of best formats

TEMPERATURES = (0.0, 1.0)
COOLER = 0.7
"""Temperatures of the trial, and the one for sampling where the best format needs it."""

COOL_BELOW = 2 / 3
"""Share of the greedy reward below which samples at temperature 1 are too poor to learn from."""

# of a format that works
MIN_PARSED = 0.95  # minimum share of completions that parse
MAX_CUT = 0.05  # maximum share of completions that max_tokens cuts

FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"kind": "chat"},
    "chat, prefilled": {"kind": "chat", "prefill": True},
    "json": {"kind": "json"},
    "json, prefilled": {"kind": "json", "prefill": True},
    "compact": {"kind": "compact", "instructions": True},
    "compact, prefilled": {"kind": "compact", "instructions": True, "prefill": True},
}
"""Keys of `program.adapter` by format."""

_STEPS = 4  # completions of a question until the first search
_MAX_TOKENS = 512  # in the trial
_MAX_TOKENS_SHORT = 128  # in the trial of a program with one output


class FirstSearch(NamedTuple):
    """The completions of a question up to the first search, and the reward of this search.

    0 if one does not parse.
    """

    samples: list[Sample]
    reward: float


class Measured(NamedTuple):
    """Shares of completions that parse and that are cut, and the mean reward."""

    parsed: float
    cut: float
    reward: float


@dataclass
class FormatTrial:
    """Results of a format.

    Attributes:
        adapter: keys of `program.adapter`.
        searches: results by temperature, in the order of the questions.
        max_tokens: number of tokens that cuts at most one completion of twenty, greedy and sampled.
        fault: why the server refuses the format.
    """

    name: str
    adapter: dict[str, Any]
    searches: dict[float, list[FirstSearch]] = field(default_factory=dict)
    max_tokens: int = 0
    fault: str = ""

    @property
    def flags(self) -> str:
        """Flags of `leret sample` that set the adapter, tokens and temperature."""
        keys = {f"program.adapter.{name}": value for name, value in self.adapter.items()}
        keys |= {"policy.max_tokens": self.max_tokens, "policy.temperature": self.temperature}
        return " ".join(f"--set {key}={str(value).lower()}" for key, value in keys.items())

    def samples(self, temperature: float) -> list[Sample]:
        samples: list[Sample] = []
        for search in self.searches.get(temperature, ()):
            samples += search.samples
        return samples

    def measured(self, temperature: float) -> Measured:
        """Return the measures at a temperature; a format without completions has the worst."""
        samples = self.samples(temperature)
        if not samples:
            return Measured(0.0, 1.0, 0.0)
        parsed = fmean(sample.failure is None for sample in samples)
        cut = fmean((sample.n_completion_tokens or 0) >= self.max_tokens for sample in samples)
        return Measured(parsed, cut, fmean(search.reward for search in self.searches[temperature]))

    @property
    def temperature(self) -> float:
        """Temperature for sampling."""
        return COOLER if COOLER in self.searches else TEMPERATURES[-1]

    @property
    def needs_cooler(self) -> bool:
        """True if completions at temperature 1 often fail, or are far worse than greedy ones."""
        greedy, drawn = (self.measured(temperature).reward for temperature in TEMPERATURES)
        return not self.works or drawn < COOL_BELOW * greedy

    @property
    def works(self) -> bool:
        """True if nearly all completions parse and end, greedy and when sampled."""
        return self.rank[:2] == (False, False)

    @property
    def rank(self) -> tuple[bool, bool, int, float]:
        """Sort key: formats that parse, then those that end, then by questions and mean reward."""
        measured = [self.measured(temperature) for temperature in (0.0, self.temperature)]
        n_questions = len(self.searches.get(0.0, ()))
        # one cut among few completions says nothing
        most_cut = max(MAX_CUT, 1 / max(1, n_questions))
        unparsed = min(each.parsed for each in measured) < MIN_PARSED
        cut = max(each.cut for each in measured) > most_cut
        return unparsed, cut, -n_questions, -fmean(each.reward for each in measured)

    def limit_tokens(self, limit: int) -> None:
        """Set ``max_tokens``; ``limit`` is the maximum number in the trial."""
        longest = 0
        for temperature in self.searches.keys() & {0.0, self.temperature}:
            lengths = sorted(
                sample.n_completion_tokens or 0 for sample in self.samples(temperature)
            )
            longest = max(longest, lengths[math.ceil((1 - MAX_CUT) * len(lengths)) - 1])
        self.max_tokens = min(limit, max(32, 16 * (longest // 16 + 1)))


@dataclass(frozen=True)
class TrialReport:
    """Formats, best first. ``reward`` names the reward."""

    formats: list[FormatTrial]
    reward: str

    @property
    def best(self) -> FormatTrial | None:
        """The first format; None if no completion parses in any format."""
        first = self.formats[0]
        return first if first.measured(TEMPERATURES[0]).parsed else None


def try_formats(
    recipe: SamplingRecipe,
    cache: Path,
    *,
    progress: Progress | None = None,
) -> TrialReport:
    """Try each format on a few questions, and the best on more, at temperatures 0 and 1.

    If completions of the best format at temperature 1 often do not parse or end, or are far worse
    than greedy ones, a lower temperature is tried too.

    Args:
        recipe: sampling recipe; its ``policy.max_tokens`` is not used, and its adapter only for
            native tool calls.
        cache: directory for the index.
        progress: shows the questions.

    Raises:
        LeretError: the policy, the data or the program cannot be opened, or no completion could be
            sampled.
    """
    recipe = resolve_paths(recipe, Path.cwd())
    for settings in recipe.by_predictor.values():
        asyncio.run(probe(settings))
    with Environment(recipe, cache, progress) as environment:
        tasks = scorable(environment.tasks(limit=N_FINAL), recipe)
        formats = asyncio.run(_try_formats(environment, tasks, progress or Progress()))
    return TrialReport(formats, "+".join(scoring(recipe.sampling.reward).parts))


async def _try_formats(
    environment: Environment, tasks: Sequence[Task], progress: Progress
) -> list[FormatTrial]:
    recipe = environment.recipe
    search = SearchBatcher(environment.retriever)
    trials, limit = _formats(environment)
    policy = open_policies(recipe.by_predictor, sampled_policy)

    async def measure(tried: FormatTrial, temperature: float, questions: Sequence[Task]) -> None:
        adapter = make_adapter(AdapterSettings.model_validate(tried.adapter))
        program = environment.program()
        read = environment.replay.read
        runner = ProgramRunner.over(program, adapter, search, read=read)
        plan = _plan(recipe, policy, temperature, limit)
        try:
            searches = await gathered(_first_search(runner, plan, task) for task in questions)
        except PolicyError as error:
            if not tried.adapter.get("prefill"):
                raise
            tried.fault = str(error)  # the server does not continue messages
            return
        tried.searches.setdefault(temperature, []).extend(searches)
        tried.limit_tokens(limit)
        progress.advance(len(questions))

    progress.start("formats", None)
    try:
        await gathered(measure(tried, 0.0, tasks[:N_FIRST]) for tried in trials)
        parsed = [tried for tried in trials if tried.measured(0.0).parsed >= MIN_PARSED]
        await gathered(measure(tried, 1.0, tasks[:N_FIRST]) for tried in parsed)
        best = [
            tried
            for tried in sorted(trials, key=lambda tried: tried.rank)[:N_BEST]
            if not tried.rank[0]
        ]
        rest = tasks[N_FIRST:]
        if rest:
            for temperature in TEMPERATURES:
                await gathered(measure(tried, temperature, rest) for tried in best)
        trials.sort(key=lambda tried: tried.rank)
        if best and trials[0].needs_cooler:
            await measure(trials[0], COOLER, tasks)
    finally:
        progress.finish()
        search.close()
        await policy.aclose()
    return trials


def _formats(environment: Environment) -> tuple[list[FormatTrial], int]:
    """Return the formats that fit the program, and the maximum number of tokens per completion."""
    recipe = environment.recipe
    signatures = [predictor.signature for predictor in environment.replay.predictors.values()]
    if not signatures:
        raise ConfigError(
            "the program has only picks; a trial needs a predictor, which writes text"
        )
    is_short = (
        all(len(signature.output_fields) == 1 for signature in signatures)
        and recipe.sampling.credit != "final"
    )
    limit = _MAX_TOKENS_SHORT if is_short else _MAX_TOKENS
    if recipe.program.adapter.use_native_function_calling:
        return [
            FormatTrial("recipe", recipe.program.adapter.model_dump(exclude_defaults=True))
        ], limit
    trials = [FormatTrial(name, keys) for name, keys in FORMATS.items()]
    for tried in trials:
        if not is_short and tried.adapter["kind"] == "compact":
            tried.adapter = {**tried.adapter, "outputs": True}
    return trials, limit


async def _first_search(runner: ProgramRunner, plan: SamplingPlan, task: Task) -> FirstSearch:
    sampler = StateSampler(runner, None, plan)
    point = await begin(runner, task)
    samples: list[Sample] = []
    reward = 0.0
    while isinstance(point.need, NeedsCompletion) and len(samples) < _STEPS:
        state = runner.state(task, point.need, len(point.steps))
        sample = (await sampler.sample_state(point, state))[0]
        if sample.failure is not None and sample.failure.kind in BOUNDARIES:
            raise BOUNDARIES[sample.failure.kind](sample.failure.message)
        if point.need.choice is None:
            samples.append(sample)
        if sample.failure is not None:
            return FirstSearch(samples, 0.0)
        reward = sample.reward or 0.0
        n_searches = len(point.need.searches)
        point = await sampler.next_point(point, sample)
        if len(point.need.searches) > n_searches:
            break
    return FirstSearch(samples, reward)


def _plan(
    recipe: SamplingRecipe, policy: Policy, temperature: float, max_tokens: int
) -> SamplingPlan:
    """Return a plan for one completion per state, scored as in the recipe."""
    settings = recipe.sampling.model_copy(update={"n_continuations": 1})
    role = Role(policy, credit="step" if settings.credit == "auto" else settings.credit)
    return SamplingPlan.of(
        settings,
        lambda need: role,
        prompts=(ZERO_SHOT,),
        n_samples=1,
        seed=settings.seed,
        temperature=temperature,
        top_p=recipe.policy.top_p,
        max_tokens=max_tokens,
        searched={},
    )
