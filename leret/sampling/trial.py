"""A trial of formats: a few questions with each adapter, to find the format in which a language model searches best.

Most models of less than a few billion parameters do not write DSPy's formats unaided. That a completion parses is not
enough: the reward of the first search decides.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import dspy
from pydantic import ConfigDict, create_model

from leret.config.base import resolve_paths
from leret.config.policy import OpenAIPolicySettings, PolicySettings, RequestBody
from leret.config.sampling import AdapterSettings, SamplingRecipe
from leret.core.errors import PolicyError
from leret.core.progress import Progress
from leret.core.types import Failure, Sample, Task
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
from leret.rollouts.failures import BOUNDARIES, FAILURES, MIN_UNPARSED, unparsed
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import begin

N_FIRST, N_FINAL = 10, 30
"""Questions per format, and of the best formats."""

N_BEST = 3
TEMPERATURES = (0.0, 1.0)
MIN_PARSED, MAX_CUT = 0.95, 0.05
"""Minimum share of completions that parse, and maximum share that max_tokens cuts, of a format that works."""

N_CHECKED, N_OFFERED = 8, 4
"""Completions of the check before sampling, and of each format that is tried if none of them parses."""

_MOST = 0.95  # share of completions that the chosen max_tokens does not cut
_STEPS = 4  # completions of a question until the first search
_LIMITS = (32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Format:
    """An adapter, and request keys for a server that make it write the adapter's format."""

    name: str
    adapter: AdapterSettings
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of `program.adapter`."""
        return {"kind": self.adapter.kind, **self.adapter.model_dump(exclude_defaults=True)}

    @property
    def flags(self) -> str:
        """Flags of `leret sample` that set the adapter."""
        return " ".join(f"--set program.adapter.{name}={str(value).lower()}" for name, value in self.keys.items())

    @property
    def python(self) -> str:
        """The adapter as Python code."""
        adapter = make_adapter(self.adapter)
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.keys.items() if name != "kind")
        return f"leret.{type(adapter).__name__}({arguments if self.adapter.kind == 'compact' else ''})"


_OFFERS = (
    Format("compact, prefilled", AdapterSettings(kind="compact", instructions=True, prefill=True)),
    Format("json, prefilled", AdapterSettings(kind="json", prefill=True)),
)


@dataclass
class FormatTrial:
    """Results of a format: the samples by temperature, in the order of the questions."""

    format: Format
    samples: dict[float, list[Sample]] = field(default_factory=dict)
    rewards: dict[float, list[float]] = field(default_factory=dict)
    max_tokens: int = 0
    fault: str = ""

    @property
    def n_questions(self) -> int:
        return len(self.rewards.get(TEMPERATURES[0], ()))

    @property
    def all_samples(self) -> list[Sample]:
        return [sample for samples in self.samples.values() for sample in samples]

    @property
    def flags(self) -> str:
        """Flags of `leret sample` that set the format."""
        body = json.dumps(self.format.extra_body, separators=(",", ":"))
        keys = [self.format.flags, f"--set policy.max_tokens={self.max_tokens}"]
        if self.format.extra_body:
            keys.append(f"--set policy.extra_body={shlex.quote(body)}")
        return " ".join(keys)

    def parsed(self, temperature: float) -> float:
        return _share(not sample.is_unparsed for sample in self.samples.get(temperature, ()))

    def cut(self, temperature: float) -> float:
        """Return the share of completions that have more than ``max_tokens`` tokens, or were cut in the trial."""
        samples = self.samples.get(temperature, ())
        return _share((sample.n_completion_tokens or 0) >= self.max_tokens for sample in samples)

    def reward(self, temperature: float) -> float:
        rewards = self.rewards.get(temperature)
        return fmean(rewards) if rewards else 0.0

    @property
    def mean_reward(self) -> float:
        return fmean(self.reward(temperature) for temperature in TEMPERATURES)

    @property
    def may_work(self) -> bool:
        """Whether no temperature so far has too many unparsed completions, and the server takes the format."""
        return not self.fault and all(self.parsed(temperature) >= MIN_PARSED for temperature in self.samples)

    @property
    def parses(self) -> bool:
        """Whether nearly all completions parse, at each temperature."""
        return not self.fault and all(self.parsed(temperature) >= MIN_PARSED for temperature in TEMPERATURES)

    @property
    def works(self) -> bool:
        """Whether nearly all completions parse and end, at each temperature."""
        for temperature in TEMPERATURES:
            n_samples = len(self.samples.get(temperature, ()))
            most_cut = max(MAX_CUT, 1 / max(1, n_samples))  # one cut among few completions says nothing
            if self.cut(temperature) > most_cut:
                return False
        return self.parses

    def limit_tokens(self, limit: int) -> None:
        """Set ``max_tokens`` to the lowest usual number that cuts hardly any completion; ``limit`` is the trial's."""
        longest = 0 if self.samples else limit
        for samples in self.samples.values():
            lengths = sorted(sample.n_completion_tokens or 0 for sample in samples)
            longest = max(longest, lengths[math.ceil(_MOST * len(lengths)) - 1])
        self.max_tokens = next((n for n in _LIMITS if longest < n <= limit), limit)


@dataclass(frozen=True)
class TrialReport:
    """Formats, best first, and the number of completions that the trial took."""

    formats: list[FormatTrial]
    n_questions: int
    n_completions: int
    reward: str

    @property
    def best(self) -> FormatTrial | None:
        """The first format; None if no completion parses in any format."""
        first = self.formats[0]
        return first if first.parsed(TEMPERATURES[0]) else None


def formats_of(environment: Environment) -> list[Format]:
    """Return the formats that fit a recipe's program and policy."""
    recipe, predictors = environment.recipe, environment.replay.predictors
    if recipe.program.adapter.use_native_function_calling:
        return [Format("as in the recipe", recipe.program.adapter)]
    signatures = [predictor.signature for predictor in predictors.values()]
    several = any(len(signature.output_fields) > 1 for signature in signatures)
    names = {"outputs": True} if several else {}
    listed = {
        "chat": {"kind": "chat"},
        "chat, prefilled": {"kind": "chat", "prefill": True},
        "json": {"kind": "json"},
        "json, prefilled": {"kind": "json", "prefill": True},
        "compact": {"kind": "compact", "instructions": True, **names},
        "compact, prefilled": {"kind": "compact", "instructions": True, **names, "prefill": True},
    }
    formats = [Format(name, AdapterSettings.model_validate(keys)) for name, keys in listed.items()]
    if isinstance(recipe.policy, OpenAIPolicySettings) and len(signatures) == 1:
        formats.append(
            Format("json, schema", AdapterSettings(kind="json"), {"response_format": _schema(signatures[0])})
        )
    return formats


def try_formats(
    recipe: SamplingRecipe, cache: Path, *, progress: Progress | None = None, n_questions: int = N_FINAL
) -> TrialReport:
    """Try each format on a few questions of the recipe, and the best formats on more, at temperatures 0 and 1.

    A format's reward is that of the first search after a completion; a completion that does not parse has 0.

    Args:
        recipe: sampling recipe; its adapter and its ``policy.max_tokens`` are not used.
        cache: directory for the index.
        progress: shows the completions.
        n_questions: questions for the best formats.

    Raises:
        LeretError: the policy, the data or the program cannot be opened, or no completion could be sampled.
    """
    progress = progress or Progress()
    recipe = resolve_paths(recipe, Path.cwd())
    for settings in recipe.by_predictor.values():
        asyncio.run(probe(settings))
    with Environment(recipe, cache, progress) as environment:
        tasks = scorable(environment.tasks(limit=n_questions), recipe)
        return asyncio.run(_try_formats(environment, tasks, progress))


async def _try_formats(environment: Environment, tasks: Sequence[Task], progress: Progress) -> TrialReport:
    trials = [FormatTrial(each) for each in formats_of(environment)]
    n_first = len(trials) * min(N_FIRST, len(tasks))
    progress.start("formats", len(TEMPERATURES) * (n_first + N_BEST * len(tasks[N_FIRST:])))
    session = _Session(environment, SearchBatcher(environment.retriever), _max_tokens(environment), progress)
    try:
        for temperature in TEMPERATURES:
            candidates = [tried for tried in trials if tried.may_work]
            await session.measure(candidates, [temperature], tasks[:N_FIRST])
        finalists = [tried for tried in _ranked(trials)[:N_BEST] if tried.parses]
        await session.measure(finalists, TEMPERATURES, tasks[N_FIRST:])
    finally:
        progress.finish()
        await session.close()
    n_completions = sum(len(tried.all_samples) for tried in trials)
    reward = "+".join(scoring(environment.recipe.sampling.reward).parts)
    return TrialReport(_ranked(trials), len(tasks), n_completions, reward)


@dataclass
class _Session:
    """Policies and searches of a trial. ``limit`` is the maximum number of tokens per completion."""

    environment: Environment
    search: SearchBatcher
    limit: int
    progress: Progress
    policies: dict[str, Policy] = field(default_factory=dict)  # by extra request keys

    async def measure(
        self, trials: Sequence[FormatTrial], temperatures: Sequence[float], questions: Sequence[Task]
    ) -> None:
        """Add the completions of some questions to each trial; all are requested together."""
        pairs = [(tried, temperature) for tried in trials for temperature in temperatures if questions]
        await asyncio.gather(*(self._measure(tried, temperature, questions) for tried, temperature in pairs))
        for tried in trials:
            tried.limit_tokens(self.limit)

    async def close(self) -> None:
        self.search.close()
        for policy in self.policies.values():
            await policy.aclose()

    async def _measure(self, tried: FormatTrial, temperature: float, questions: Sequence[Task]) -> None:
        runner = _environment_of(self.environment, tried.format.adapter).runner(self.search)
        plan = _plan(self.environment.recipe, self._policy(tried.format), temperature, self.limit)
        try:
            results = await asyncio.gather(*(_first_search(runner, plan, task) for task in questions))
        except PolicyError as error:
            if not tried.format.extra_body and not tried.format.adapter.prefill:
                raise
            tried.fault = str(error)  # the server does not know the request keys
            return
        for samples, reward in results:
            tried.samples.setdefault(temperature, []).extend(samples)
            tried.rewards.setdefault(temperature, []).append(reward)
        self.progress.advance(len(questions))

    def _policy(self, format: Format) -> Policy:
        key = json.dumps(format.extra_body)
        if key not in self.policies:
            recipe = self.environment.recipe
            settings = {name: _with_body(each, format.extra_body) for name, each in recipe.by_predictor.items()}
            self.policies[key] = open_policies(settings, sampled_policy)
        return self.policies[key]


async def refuse_format(
    plan: SamplingPlan,
    adapter: dspy.Adapter,
    tasks: Sequence[Task],
    runner_of: Callable[[dspy.Adapter], ProgramRunner],
) -> None:
    """Raise PolicyError if no completion of the first tasks parses, and name a format that does, if there is one.

    ``runner_of`` returns a runner of the program with an adapter. At most 16 completions are sampled.
    """
    plan = replace(plan, prompts=(ZERO_SHOT,))
    checked = tasks[:N_CHECKED]
    failures = await _unparsed(runner_of(adapter), plan, checked)
    if len(failures) < max(MIN_UNPARSED, len(checked)):
        return
    advice = "the compact and json adapters do not help; use another policy.model or policy.max_tokens"
    for offer in _OFFERS:
        runner = runner_of(make_adapter(offer.adapter))
        if not await _unparsed(runner, plan, tasks[:N_OFFERED]):
            advice = f"all of {N_OFFERED} completions parse with {offer.flags} (in Python: {offer.python})"
            break
    raise PolicyError(
        f"{len(failures)} of {len(failures)} completions do not parse, for example: {failures[0].message}; {advice}. "
        "`leret trial RECIPE` compares all formats by reward. Set program.adapter and name a new run directory"
    )


async def _unparsed(runner: ProgramRunner, plan: SamplingPlan, tasks: Sequence[Task]) -> list[Failure]:
    """Return the failures of the tasks' first completions that do not parse."""
    sampler = StateSampler(runner, None, replace(plan, role=lambda need: replace(plan.role(need), n_samples=1)))

    async def first(task: Task) -> Failure | None:
        try:
            point = await begin(runner, task)
        except FAILURES:
            return None  # sampling reports it
        if not isinstance(point.need, NeedsCompletion) or point.need.choice is not None:
            return None
        [sample] = await sampler.draw(point, runner.state(task, point.need, 0))
        text = sample.completion
        if text is None or isinstance(runner.formatter.step(point.need, text).outputs, list):
            return None
        return unparsed(runner.formatter, point.need.predictor, text)

    failures = await asyncio.gather(*(first(task) for task in tasks))
    return [failure for failure in failures if failure is not None]


async def _first_search(runner: ProgramRunner, plan: SamplingPlan, task: Task) -> tuple[list[Sample], float]:
    """Run a program to its first search after a completion; return the samples, and the last sample's reward."""
    sampler = StateSampler(runner, None, plan)
    point = await begin(runner, task)
    samples: list[Sample] = []
    reward = 0.0
    while isinstance(point.need, NeedsCompletion) and len(samples) < _STEPS:
        state = runner.state(task, point.need, len(point.steps))
        [sample] = await sampler.sample_state(point, state)
        if sample.failure is not None and sample.failure.is_outage:
            raise BOUNDARIES[sample.failure.kind](sample.failure.message)
        if point.need.choice is None:
            samples.append(sample)
        if sample.failure is not None:
            return samples, 0.0
        reward = sample.reward or 0.0
        n_searches = len(point.need.searches)
        point = await sampler.next_point(point, sample)
        if len(point.need.searches) > n_searches:
            break
    return samples, reward


def _plan(recipe: SamplingRecipe, policy: Policy, temperature: float, max_tokens: int) -> SamplingPlan:
    """Return a plan for one completion per state, scored as in the recipe."""
    settings = recipe.sampling
    end = settings.end_reward
    credit = "step" if settings.credit == "auto" else settings.credit

    def role(need: NeedsCompletion) -> Role:
        return Role(policy, credit=credit)

    return SamplingPlan(
        (ZERO_SHOT,), 1, settings.seed, temperature, recipe.policy.top_p, max_tokens, role,
        reward=scoring(settings.reward), final=None if end is None else scoring(end, "final"),
        final_weight=settings.final_weight, gamma=settings.gamma, searched={},
    )  # fmt: skip


def _environment_of(environment: Environment, adapter: AdapterSettings) -> Environment:
    """Return the environment with another adapter, and the same corpus and retriever."""
    program = environment.recipe.program.model_copy(update={"adapter": adapter})
    changed = Environment(environment.recipe.model_copy(update={"program": program}), environment.cache)
    changed.retriever = environment.retriever
    return changed


def _max_tokens(environment: Environment) -> int:
    """Return the trial's limit: short if each predictor writes only a text, such as a query."""
    for predictor in environment.replay.predictors.values():
        if [output.annotation for output in predictor.signature.output_fields.values()] != [str]:
            return _LIMITS[-1]
    return 128 if environment.recipe.sampling.credit != "final" else _LIMITS[-1]


def _with_body(settings: PolicySettings, body: Mapping[str, Any]) -> PolicySettings:
    if not body or not isinstance(settings, OpenAIPolicySettings):
        return settings
    return settings.model_copy(update={"extra_body": RequestBody({**settings.extra_body, **body})})


def _schema(signature: type[dspy.Signature]) -> dict[str, Any]:
    """Return the response format that makes a server write a signature's outputs as JSON."""
    fields: dict[str, Any] = {name: (field.annotation, ...) for name, field in signature.output_fields.items()}
    schema = create_model("Outputs", __config__=ConfigDict(extra="forbid"), **fields).model_json_schema()
    return {"type": "json_schema", "json_schema": {"name": "outputs", "schema": schema}}


def _ranked(trials: Iterable[FormatTrial]) -> list[FormatTrial]:
    """Sort: working formats first, then those that parse, those tried on more questions, and by the mean reward."""

    def key(tried: FormatTrial) -> tuple[bool, bool, int, float]:
        return not tried.works, not tried.parses, -tried.n_questions, -tried.mean_reward

    return sorted(trials, key=key)


def _share(values: Iterable[bool]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else 0.0
