"""Evaluating systems one after another, each only as far as it is not evaluated yet."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from leret.core.errors import PolicyError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Document, Rollout, Task, digest
from leret.evaluation.baselines import Script, ScriptedPolicy, fuse, oracle_titles, raw_question, rm3_retriever
from leret.evaluation.measures import Scorer
from leret.evaluation.results import ScoredHop, SystemResults, read_results, write_results
from leret.evaluation.systems import ORACLE, RM3, System
from leret.policies.base import Policy
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.rollout import BOUNDARIES, Actor, PolicyActor, RolloutRunner


@dataclass(frozen=True)
class Policies:
    """The policies of a run: what they are, and how they are opened.

    Attributes:
        digest: names what a system's policy computes, without loading it.
        open: loads it, or connects to it.
    """

    digest: Callable[[System], str]
    open: Callable[[System], Policy]


@dataclass
class Evaluator:
    """Evaluates systems on one set of questions.

    Attributes:
        directory: results are kept there.
        questions: in the order of the results.
        corpus: for the oracle's titles, and the measure that looks at them.
        key: what all systems share: data, program, retriever, settings.
    """

    run: Run
    directory: Path
    setup: EvaluationSetup
    policies: Policies
    questions: Sequence[Task]
    corpus: Mapping[str, Document]
    measures: Sequence[str]
    key: str
    progress: Progress
    # A policy's connections are of one event loop.
    _open: tuple[str, Policy, asyncio.Runner] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.measures, self.questions, self.corpus)

    def evaluate(self, system: System) -> tuple[SystemResults, bool]:
        """The system's rows, and whether anything had to be asked for them."""
        kept, todo = self.missing(system)
        if not todo:
            return kept, False
        if system.prompt is not None:
            self._policy(system)  # loading it is not the system's time
        began = time.monotonic()
        new: list[ScoredHop] = []
        try:
            self._ask(system, todo, lambda rollout: new.extend(self._scorer.rows(rollout)), len(kept.runs()))
        finally:  # an interruption or an outage keeps what is done
            kept.rows += new
            kept.seconds += time.monotonic() - began
            place = {question.id: i for i, question in enumerate(self.questions)}
            rows = sorted(kept.rows, key=lambda row: (row.sample, place[row.question_id], row.hop))
            everything = SystemResults(kept.key, rows, kept.seconds)
            with self.run.writing(), ThreadPoolExecutor(1) as writer:  # which Ctrl-C does not interrupt
                writer.submit(write_results, self.directory / system.name, everything, self.measures).result()
        return everything, True

    def missing(self, system: System) -> tuple[SystemResults, dict[int, list[Task]]]:
        """What is there of a system, and the questions that are not, by sample."""
        samples = self.setup.samples if system.prompt is not None else 1
        ids = [question.id for question in self.questions]
        kept = read_results(self.directory / system.name, self._key_of(system)).only(ids, samples)
        done = kept.runs()
        todo = {sample: [q for q in self.questions if (q.id, sample) not in done] for sample in range(samples)}
        return kept, {sample: questions for sample, questions in todo.items() if questions}

    def close(self) -> None:
        if self._open is not None:
            _, policy, loop = self._open
            self._open = None
            loop.run(policy.aclose())
            loop.close()

    def _key_of(self, system: System) -> str:
        if system.prompt is None:
            return digest(self.key, system.name, *map(self._key_of, system.parts))
        setup = self.setup
        sampling = [setup.max_tokens, setup.temperature, setup.top_p]
        sampling += [setup.seed] if setup.temperature > 0 else []
        return digest(self.key, self.policies.digest(system), system.prompt.digest, sampling)

    def _ask(
        self, system: System, todo: Mapping[int, Sequence[Task]], on_rollout: Callable[[Rollout], None], n_before: int
    ) -> None:
        self.progress.start(f"evaluating {system.name}", sum(map(len, todo.values())))
        failures = 0

        def ended(rollout: Rollout) -> None:
            nonlocal failures
            on_rollout(rollout)
            failures += rollout.error is not None
            self.progress.advance(1, failures=failures)

        setup, retriever = self.setup, self.setup.retriever
        try:
            if system.prompt is not None:
                policy, loop = self._policy(system)
                settings = setup.max_tokens, setup.temperature, setup.top_p, setup.seed
                actor = PolicyActor(policy, setup.formatter, *settings, system.prompt)
                loop.run(run_system(setup, retriever, actor, todo, ended, n_before))
            elif system.parts:
                for rollout in fuse([self.missing(part)[0].rows for part in system.parts], todo[0]):
                    ended(rollout)
            elif system.name == ORACLE:
                n_steps: dict[str, int] = {}
                self._ask_script(retriever, raw_question, todo, lambda r: n_steps.update({r.question_id: len(r.hops)}))
                self._ask_script(retriever, oracle_titles(self.corpus, n_steps), todo, ended)
            else:
                asked = rm3_retriever(setup.engine) if system.name == RM3 else retriever
                self._ask_script(asked, raw_question, todo, ended)
        finally:
            self.progress.finish()

    def _ask_script(
        self,
        retriever: Retriever,
        script: Script,
        todo: Mapping[int, Sequence[Task]],
        on_rollout: Callable[[Rollout], None],
    ) -> None:
        actor = ScriptedPolicy(self.setup.formatter, script)
        asyncio.run(run_system(self.setup, retriever, actor, todo, on_rollout))

    def _policy(self, system: System) -> tuple[Policy, asyncio.Runner]:
        """The system's policy; systems of one policy follow each other, so one is held at a time."""
        name = system.policy or ""
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = (name, self.policies.open(system), asyncio.Runner())
        return self._open[1:]


CONCURRENCY = 256
"""Questions in flight: what waits together is decoded together."""

_MIN_RUNS = 50
_MAX_FAILED = 0.5
"""Where more than half of at least fifty runs failed, the cause is not in the questions."""


@dataclass(frozen=True)
class EvaluationSetup:
    """A program over a retriever, and how completions are asked for.

    Attributes:
        engine: the retriever without its cache, whose index RM3 reads.
        samples: runs a question; 1 where ``temperature`` is 0, since all would be the same.
    """

    replay: Replay
    formatter: Formatter
    retriever: Retriever
    engine: Retriever
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0


async def run_system(
    setup: EvaluationSetup,
    retriever: Retriever,
    actor: Actor,
    todo: Mapping[int, Sequence[Task]],
    on_rollout: Callable[[Rollout], None],
    n_before: int = 0,
) -> None:
    """Run every question."""
    searches = SearchBatcher(retriever)
    runner = RolloutRunner(ProgramRunner(setup.replay, setup.formatter, searches), actor)
    n_runs, n_done, failures = sum(map(len, todo.values())), 0, Counter[str]()

    def done(rollout: Rollout) -> None:
        nonlocal n_done
        on_rollout(rollout)
        n_done += 1
        failure = rollout.failure
        if failure is None or failure.kind == "parse":
            return
        failures[failure.kind] += 1
        n_failed = failures.total()
        n_all = n_done + (n_before if failure.kind == "prompt" else 0)  # which fails at every call again
        if n_failed > _MAX_FAILED * n_all and n_done >= min(_MIN_RUNS, n_runs):
            raise BOUNDARIES.get(failure.kind, PolicyError)(
                f"{n_failed} of {n_all} runs failed, so the evaluation stopped; the last one: "
                f"{failure.message}. What is done is kept: correct the cause and run the same command again"
            )

    try:
        for index, tasks in todo.items():
            await runner.run(tasks, index=index, concurrency=CONCURRENCY, on_done=done)
    finally:
        searches.close()
