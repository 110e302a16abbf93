"""Evaluation of systems in sequence. Questions with stored results are not run again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from leret.config.evaluation import ReaderSettings
from leret.config.policy import LocalPolicySettings, PolicySettings, by_predictor
from leret.core.errors import PolicyError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Failure, Rollout, Task, digest, message
from leret.evaluation.measures import Measures, Scorer
from leret.evaluation.results import SystemResults, read_results, write_results
from leret.evaluation.systems import Session, System
from leret.policies.base import Policy, Request
from leret.policies.load import compute_digest, make_policy, open_policies
from leret.programs.prompts import reader_lines
from leret.rollouts.actors import Decoding
from leret.rollouts.environment import Environment
from leret.rollouts.failures import BOUNDARIES, failure_of

_MIN_RUNS = 50
_MAX_FAILED = 0.5
"""The evaluation stops if more than this share of runs has failed.

It checks once `_MIN_RUNS` runs have ended.
"""


@dataclass(frozen=True)
class Policies:
    """Policies of a run: ``others`` by predictor, and ``base`` for all other predictors."""

    base: PolicySettings
    others: Mapping[str, PolicySettings] = field(default_factory=dict)

    def settings(self, system: System | None) -> dict[str, PolicySettings]:
        """Map predictors to a system's policy settings.

        The key "" is for the predictors that are not listed.
        """
        if system is not None and system.settings:
            return dict(system.settings)
        settings: dict[str, PolicySettings] = {"": self.base, **self.others}
        if system is None:
            return settings
        for directory, predictors in system.directories.items():
            before = self.others.get(next(iter(predictors), ""), self.base)
            trained = before.in_process(str(directory.resolve()))
            others = {name: policy for name, policy in settings.items() if name}
            settings = by_predictor(self.base, others, trained, predictors)
        return settings

    def digest(self, system: System) -> str:
        """Compute the digest of a system's policies without loading them."""
        digests = {}
        for name, policy in self.settings(system).items():
            digests[name] = compute_digest(policy)
        return digests[""] if len(digests) == 1 else digest("policies", digests)


@dataclass
class Evaluator:
    """Evaluates systems on one set of questions.

    ``key`` is a digest of the inputs that all systems share.
    """

    run: Run
    directory: Path
    environment: Environment
    decoding: Decoding
    samples: int  # runs per question for systems with an LM
    policies: Policies
    questions: Sequence[Task]
    measures: Measures
    key: str
    progress: Progress
    others: Mapping[str, Environment] = field(default_factory=dict)
    """Environments with other retrievers, by `System.retriever`."""
    reader: ReaderSettings | None = None
    dtype: Literal["float32"] | None = None  # of local policies; None: as their settings say
    # Open policies by name (None: the reader).
    # They share an event loop, because connections belong to one loop.
    _open: dict[str | None, Policy] = field(default_factory=dict, init=False)
    _loop: asyncio.Runner = field(default_factory=asyncio.Runner, init=False)

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.measures, self.questions, self.environment.corpus)

    def evaluate(self, system: System) -> tuple[SystemResults, bool]:
        """Return the system's results, and whether any question had to be run."""
        results, todo = self.missing(system)
        if not todo:
            return results, False
        if system.prompt is not None:  # load now: loading is not part of the system's seconds
            self._policy(system.policy or "", self.policies.settings(system))
        if self.reader is not None:
            self._policy(None, {"": self.reader.policy})
        began = time.monotonic()
        try:
            self._ask(system, todo, results)
        finally:  # also after an interruption or an outage
            results.seconds += time.monotonic() - began
            results.sort([question.id for question in self.questions])
            directory = self.directory / system.name
            # Ctrl-C does not interrupt threads
            with self.run.writing(), ThreadPoolExecutor(1) as writer:
                writer.submit(write_results, directory, results, list(self.measures)).result()
        return results, True

    def missing(self, system: System) -> tuple[SystemResults, list[tuple[Task, int]]]:
        """Return stored results, and the questions and sample numbers without results."""
        samples = self.samples if system.prompt is not None else 1
        ids = [question.id for question in self.questions]
        stored = read_results(self.directory / system.name, self._key_of(system))
        results = stored.only(ids, samples)
        done = results.runs()
        todo = []
        for sample in range(samples):
            todo += [(task, sample) for task in self.questions if (task.id, sample) not in done]
        return results, todo

    def close(self) -> None:
        while self._open:
            self._loop.run(self._open.popitem()[1].aclose())
        self._loop.close()

    def _key_of(self, system: System) -> str:
        key = self.key
        if system.retriever is not None:
            key = digest(key, self.others[system.retriever].retriever.digest)
        if system.prompt is None:
            return digest(key, system.name)
        decoding = self.decoding
        sampling: list[Any] = [decoding.max_tokens, decoding.temperature, decoding.top_p]
        if decoding.temperature > 0:
            sampling.append(decoding.seed)
        if decoding.limits:
            sampling.append(decoding.limits)
        return digest(key, self.policies.digest(system), system.prompt.digest, sampling)

    def _ask(
        self, system: System, runs: Sequence[tuple[Task, int]], results: SystemResults
    ) -> None:
        n_before = len(results.runs())
        self.progress.start(f"evaluating {system.name}", len(runs))
        n_done = n_failed = 0

        async def ended(rollout: Rollout) -> None:
            nonlocal n_done, n_failed
            rollout, n_calls, n_tokens = await self._read(rollout)
            *rows, last = self._scorer.rows(rollout)
            n_calls += last.lm_calls
            n_tokens += last.n_tokens
            results.rows += [*rows, replace(last, lm_calls=n_calls, n_tokens=n_tokens)]
            n_done += 1
            n_failed += rollout.error is not None
            self.progress.advance(1, failures=n_failed)
            if rollout.failure and not rollout.unparsed and n_done >= min(_MIN_RUNS, len(runs)):
                _stop_if_most_failed(rollout.failure, n_failed, n_done, n_before)

        source = self.environment if system.retriever is None else self.others[system.retriever]
        policy = self._open.get(system.policy or "")
        session = Session(self.environment, source.retriever, policy, self.decoding, runs, ended)
        try:
            self._loop.run(system.run(session))
        finally:
            self.progress.finish()

    async def _read(self, rollout: Rollout) -> tuple[Rollout, int, int]:
        """Return the rollout with the reader's answer, and the reader's LM calls and tokens."""
        reader = self.reader
        if reader is None or rollout.error is not None:
            return rollout, 0, 0
        passages = rollout.ranking[: reader.passages]
        chat = getattr(reader.policy, "template", None) != "plain"
        try:
            task = self._scorer.tasks[rollout.task_id]
            lines = reader_lines(task, passages, reader.words, chat, reader.instruction)
            messages = (message("user", "\n".join(lines)),)
            request = Request(
                messages, (0,), 0.0, reader.policy.max_tokens, stop=() if chat else ("\n",)
            )
            [completion] = await self._open[None].complete(request)
        except PolicyError as error:
            failure = replace(
                failure_of(error), message=f"reader ({len(passages)} passages): {error}"
            )
            return replace(rollout, failure=failure, prediction=None), 0, 0
        n_tokens = completion.n_prompt_tokens + completion.n_completion_tokens
        return replace(rollout, prediction=completion.text.strip()), 1, n_tokens

    def _policy(self, name: str | None, settings: Mapping[str, PolicySettings]) -> None:
        """Open a policy and leave it open for the next systems.

        A different one is closed, except the reader.
        """
        if name in self._open:
            return
        if name is not None:
            for previous in set(self._open) - {None}:
                self._loop.run(self._open.pop(previous).aclose())
        self._open[name] = open_policies(settings, self._make)

    def _make(self, settings: PolicySettings) -> Policy:
        if self.dtype is not None and isinstance(settings, LocalPolicySettings):
            settings = settings.model_copy(update={"dtype": self.dtype})
        return make_policy(settings)


def _stop_if_most_failed(failure: Failure, n_failed: int, n_done: int, n_before: int) -> None:
    n_all = n_done
    if failure.kind == "prompt":  # a prompt that is too long always fails
        n_all += n_before
    if n_failed > _MAX_FAILED * n_all:
        boundary = BOUNDARIES.get(failure.kind, PolicyError)
        raise boundary(
            f"evaluation stopped because {n_failed} of {n_all} runs failed; "
            f"last failure: {failure.message}. "
            "Finished runs are stored; fix the cause and run the same command again"
        )
