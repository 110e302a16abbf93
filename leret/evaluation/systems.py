"""Systems that can be evaluated in a run, by name.

=================  ========================================================================
``raw-question``   no LM: the question answers every LM call, so it is the query at every hop. A
                   choice takes the candidate without text if there is one, else the next candidate
                   in BM25's ranking for the question. If a call has outputs that are not texts,
                   such as an agent's tool: one search with the question
``oracle-titles``  no LM: the gold titles are the queries, one title per query. A choice takes a
                   gold candidate; if no candidate ever is a gold document, the system is left out,
                   because it is no upper bound
``rm3``            no LM: the question expanded by RM3 is the query at every hop; needs a retriever
                   of kind bm25
``base``           the run's policy before training, zero-shot
``hyde``           the base policy writes a passage that could answer the question; the passage is
                   the query
``bank:1`` ...     the base policy with a few-shot prompt from the run's prompt bank; ``few-shot:1``
                   in tables and recipes
a name             a trained policy of the run, zero-shot; the base policy with a prompt file from
                   the recipe's ``demos``; a saved program, also from ``demos``; or a policy of any
                   kind from ``actors``
=================  ========================================================================

``SYSTEM@NAME``, for every system except ``rm3``, searches with a retriever from the recipe's
``retrievers``. A retriever that no name in ``systems`` mentions is used with all selected systems.

``bank`` selects the best few-shot prompt of the bank, ``policies`` every trained policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal

from leret.config.base import secrets_in
from leret.config.evaluation import label
from leret.config.load import sampling_recipe_of
from leret.config.messages import nearest
from leret.config.policy import PolicySettings
from leret.core.aio import for_each
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.core.types import Rollout, Task
from leret.evaluation.baselines import (
    HydeActor,
    Script,
    ScriptedPolicy,
    marked_question,
    one_search,
    oracle_titles,
    query_places,
    raw_question,
    rm3_retriever,
    special_fields,
)
from leret.policies.base import Policy
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.runner import ProgramRunner
from leret.programs.saved import saved_policies
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Actor, Decoding, PolicyActor
from leret.rollouts.environment import Environment
from leret.rollouts.walk import RolloutRunner

RAW = "raw-question"
ORACLE = "oracle-titles"
RM3 = "rm3"
BASE = "base"
HYDE = "hyde"
CONCURRENCY = 256
"""Maximum number of questions in flight; waiting requests are decoded in one batch."""

OnEnd = Callable[[Rollout], Awaitable[None]]


@dataclass(frozen=True)
class Session:
    """The program, retriever and policy that a system runs with.

    ``runs`` are questions and the numbers of their runs; ``on_end`` gets each rollout.
    """

    environment: Environment
    retriever: Retriever
    policy: Policy | None  # None for baselines
    decoding: Decoding
    runs: Sequence[tuple[Task, int]]
    on_end: OnEnd

    async def walk(self, actor: Actor, on_end: OnEnd | None = None) -> None:
        """Run the program with an actor on every question."""
        notify = on_end or self.on_end
        searches = SearchBatcher(self.retriever)
        environment = self.environment
        program = ProgramRunner(environment.replay, environment.formatter, searches)
        runner = RolloutRunner(program, actor)

        async def run_to_end(run: tuple[Task, int]) -> None:
            await notify(await runner.run_one(*run))

        try:
            await for_each(self.runs, run_to_end, CONCURRENCY)
        finally:
            searches.close()

    def scripted(self, script: Script, picks_gold: bool = False) -> ScriptedPolicy:
        return ScriptedPolicy(self.environment.formatter, script, picks_gold)


@dataclass(frozen=True)
class System:
    """A policy with a prompt. Baselines, which have neither, are subclasses."""

    only_searches: ClassVar[bool] = False
    """True if the system only writes queries, so that the program's answers have no meaning."""

    name: str
    kind: Literal["baseline", "base", "prompt", "policy"]
    policy: str | None = None  # ``base``, a trained policy, or one of the recipe's ``actors``
    settings: Mapping[str, PolicySettings] = field(default_factory=dict)
    """Settings of an actor or saved program, by predictor."""
    prompt: Prompt | None = None
    rivals: tuple[str, ...] = ()  # systems to compare with, in addition to the recipe's baseline
    control: bool = False  # trained only to explain the gains of other policies
    retriever: str | None = None  # one of the recipe's ``retrievers``; None: the run's
    directories: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    """Predictors of each trained policy, by its directory; empty: all predictors."""

    @property
    def method(self) -> str:
        """The name without the retriever."""
        return self.name.removesuffix(f"@{self.retriever}") if self.retriever else self.name

    @property
    def shows_hint(self) -> bool:
        return self.prompt is not None and self.prompt.hint is not None

    async def run(self, session: Session) -> None:
        """Run every question of a session to its end."""
        assert session.policy is not None
        assert self.prompt is not None
        formatter = session.environment.formatter
        await session.walk(PolicyActor(session.policy, formatter, session.decoding, self.prompt))


class RawQuestion(System):
    """The question answers every LM call."""

    only_searches = True

    async def run(self, session: Session) -> None:
        predictors = session.environment.replay.predictors.items()
        if not any(special_fields(name, predictor.signature) for name, predictor in predictors):
            return await session.walk(session.scripted(raw_question))
        tasks = [task for task, _ in session.runs]
        searches = one_search(session.retriever, tasks, session.environment.recipe.retriever.k)
        await for_each(searches, session.on_end, CONCURRENCY)


class OracleTitles(System):
    """The gold titles are the queries."""

    only_searches = True

    async def run(self, session: Session) -> None:
        queries: dict[str, dict[int, int]] = {}

        async def note(rollout: Rollout) -> None:
            queries[rollout.task_id] = query_places(rollout)

        await session.walk(session.scripted(marked_question, picks_gold=True), note)
        titles = oracle_titles(session.environment.corpus, queries)
        await session.walk(session.scripted(titles, picks_gold=True))


class ExpandedQuestion(System):
    """The question is the query, which RM3 expands."""

    only_searches = True

    async def run(self, session: Session) -> None:
        expanding = replace(session, retriever=rm3_retriever(session.environment.engine))
        await expanding.walk(session.scripted(raw_question))


class Hyde(System):
    """The base policy writes a passage, which is the query."""

    only_searches = True

    async def run(self, session: Session) -> None:
        assert session.policy is not None
        await session.walk(HydeActor(session.policy, session.decoding))


def available(
    run: Run,
    demos: Mapping[str, str],
    actors: Mapping[str, PolicySettings],
    retrievers: Iterable[str] = (),
) -> dict[str, System]:
    """Return all systems of a run by name, in the order of the report's table."""
    systems = [
        RawQuestion(RAW, "baseline"),
        OracleTitles(ORACLE, "baseline"),
        ExpandedQuestion(RM3, "baseline"),
        System(BASE, "base", BASE, prompt=ZERO_SHOT),
        Hyde(HYDE, "prompt", BASE, prompt=Prompt(HYDE), rivals=(RAW,)),
    ]
    bank = sorted(
        map(Prompt.load, run.prompts.glob("*.json")),
        key=lambda prompt: (len(prompt.name), prompt.name),
    )
    for prompt in bank:
        if prompt.name != ZERO_SHOT.name:
            systems.append(System(f"bank:{prompt.name}", "prompt", BASE, prompt=prompt))
    systems += _policies(run)
    by_name = {system.name: system for system in systems}
    for key, names in (("demos", demos), ("actors", actors)):
        for name in names:
            if name in by_name or not name or "/" in name or name.startswith("."):
                raise ConfigError(
                    f"{key}: {name!r} is in use or invalid; "
                    "choose a new name without '/' or leading '.'"
                )
            by_name[name] = System(name, "prompt", BASE, prompt=ZERO_SHOT)
    for name, path in demos.items():
        by_name[name] = replace(by_name[name], prompt=Prompt.load(Path(path)))
        saved = saved_policies(Path(path))
        if saved:
            _refuse_keys(saved, run, f"demos.{name}: {path}")
            by_name[name] = replace(by_name[name], policy=name, settings=saved)
    for name, actor in actors.items():
        settings = {"": actor}
        by_name[name] = replace(by_name[name], policy=name, settings=settings, rivals=(RAW,))
    for retriever, system in product(retrievers, list(by_name.values())):
        if system.name != RM3:
            rivals = (system.name, *(f"{rival}@{retriever}" for rival in system.rivals))
            name = f"{system.name}@{retriever}"
            by_name[name] = replace(system, name=name, retriever=retriever, rivals=rivals)
    return by_name


def _refuse_keys(policies: Mapping[str, PolicySettings], run: Run, origin: str) -> None:
    """Raise ConfigError if a saved program sends a key to a server that is not the recipe's."""
    trusted = secrets_in(sampling_recipe_of(run))
    for variable, urls in sorted({*secrets_in(policies)}.difference(trusted)):
        if variable in os.environ:
            raise ConfigError(
                f"{origin} sends the key in ${variable} to {urls}; if you trust it, "
                f"name its policy under `actors` instead, or unset {variable}"
            )


def select(
    names: Sequence[str], systems: Mapping[str, System], demos: Sequence[str] = ()
) -> list[System]:
    """Return the systems that a recipe names, each once, in the report's order.

    ConfigError for unknown names.
    """
    wanted = set(demos)
    problems = []
    of_run = [system for system in systems.values() if system.retriever is None]
    for name in names:
        if name == "bank":
            bank = [system for system in of_run if system.name.startswith("bank:")]
            wanted |= {system.name for system in bank[:1] if not system.shows_hint}
        elif name == "policies":
            wanted |= {system.name for system in of_run if system.kind == "policy"}
        elif name in systems:
            wanted.add(name)
        else:
            hint = nearest(name, systems) or ";"
            problems.append(
                f"systems: unknown system {label(name)!r}{hint} available: {label(', '.join(systems))}"
            )
    for name in sorted(wanted):
        if systems[name].shows_hint:
            problems.append(
                f"systems: {name} shows hints about the gold documents, which only training may "
                "use; remove it, and evaluate a policy that was trained on its samples"
            )
    if problems:
        raise ConfigError(problems)
    mentioned = {systems[name].retriever for name in wanted}
    selected = []
    for system in systems.values():
        is_implied = system.method in wanted and system.retriever not in mentioned
        if system.name in wanted or is_implied:
            selected.append(system)
    return selected


def focus(systems: Sequence[System], values: Mapping[str, float] | None = None) -> str | None:
    """Return the policy to report and deliver.

    This is the policy with the highest value, or the last if ``values`` is missing. A control is
    returned only if there are no other policies.
    """
    policies = [
        system for system in systems if system.kind == "policy" and system.retriever is None
    ]
    candidates = [system.name for system in policies if not system.control]
    if not candidates:
        candidates = [system.name for system in policies]
    values = values or {}
    return max(reversed(candidates), key=lambda name: values.get(name, 0.0), default=None)


def completions_used(run: Run) -> dict[str, int]:
    """Count the completions that a run stored (``sampled``), and the fresh ones of each training.

    Continuations are included. The log has means over rounds, so the counts of trainings are rounded.
    """
    used = {}
    done = run.path / "sample.done"
    if done.is_file():
        report = json.loads(done.read_text(encoding="utf-8"))["report"]
        used["sampled"] = int(report["samples"])
    for name, note in run.trainings().items():
        log = note.get("log_history") or ()
        by_round = [row["num_completions"] for row in log if "num_completions" in row]
        if by_round:
            n_rounds = note.get("rounds") or note["steps"]  # an earlier version had no "rounds"
            used[name] = round(fmean(by_round) * n_rounds)
    return used


def _policies(run: Run) -> list[System]:
    notes = run.trainings()
    recipes = {}
    for name, note in notes.items():
        key = note.get("key") or {}
        recipes[name] = key.get("recipe") or {}
    systems = []
    for name, note in notes.items():
        recipe = recipes[name]
        rivals = [note["parent"]] if note.get("parent") in notes else []
        for control, control_recipe in recipes.items():
            if control_recipe.get("match_steps_of") == name:
                rivals.append(control)
        is_control = recipe.get("match_steps_of") is not None or recipe.get("targets") == "random"
        directories = {}
        for actor in ("picker", "writer"):
            directory = run.policies / name / actor
            if directory.is_dir():
                directories[directory] = tuple(recipe[actor].get("predictors") or ())
        if not directories:
            directories[run.policies / name] = tuple(recipe.get("predictors") or ())
        system = System(
            name,
            "policy",
            name,
            prompt=ZERO_SHOT,
            rivals=(*rivals, RAW),
            control=is_control,
            directories=directories,
        )
        systems.append(system)
    return systems
