"""Systems that can be evaluated in a run, by name.

=================  ========================================================================
``raw-question``   no LM: the question answers every LM call, so it is the query at every hop. A choice takes the
                   candidate without text if there is one, else the next candidate in BM25's ranking for the question.
                   If a call has outputs that are not texts, such as an agent's tool: one search with the question
``oracle-titles``  no LM: the gold titles are the queries, one title per query. A choice takes a gold candidate;
                   if no candidate ever is a gold document, the system is left out, because it is no upper bound
``rm3``            no LM: the question expanded by RM3 is the query at every hop; needs a retriever of kind bm25
``base``           the run's policy before training, zero-shot
``hyde``           the base policy writes a passage that could answer the question; the passage is the query
``bank:1`` ...     the base policy with a few-shot prompt from the run's prompt bank
a name             a trained policy of the run, zero-shot; the base policy with a prompt file from the recipe's
                   ``demos``; a saved program, also from ``demos``; or a policy of any kind from ``actors``
=================  ========================================================================

``SYSTEM@NAME``, for every system except ``rm3``, searches with a retriever from the recipe's ``retrievers``. A
retriever that no name in ``systems`` mentions is used with all selected systems.

``bank`` selects every prompt of the bank, ``policies`` every trained policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from leret.config.base import secrets_in
from leret.config.load import sampling_recipe_of
from leret.config.messages import nearest
from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.saved import saved_policies

RAW = "raw-question"
ORACLE = "oracle-titles"
RM3 = "rm3"
BASE = "base"
HYDE = "hyde"
_REMOVED = ("best-of-", "fused:")
"""Prefixes of systems that earlier versions evaluated."""


@dataclass(frozen=True)
class System:
    """A system that answers questions. Baselines have neither policy nor prompt."""

    name: str
    kind: Literal["baseline", "base", "prompt", "policy"]
    policy: str | None = None  # ``base``, a trained policy, or one of the recipe's ``actors``
    settings: Mapping[str, PolicySettings] = field(
        default_factory=dict
    )  # of an actor or saved program, by predictor
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
    def searches(self) -> bool:
        """True if the system only writes queries, so that the program's answers have no meaning."""
        return self.kind == "baseline" or self.method == HYDE


def available(
    run: Run,
    demos: Mapping[str, str],
    actors: Mapping[str, PolicySettings],
    retrievers: Iterable[str] = (),
) -> dict[str, System]:
    """Return all systems of a run by name, in the order of the report's table."""
    systems = [System(name, "baseline") for name in (RAW, ORACLE, RM3)]
    systems.append(System(BASE, "base", BASE, prompt=ZERO_SHOT))
    systems.append(System(HYDE, "prompt", BASE, prompt=Prompt(HYDE), rivals=(RAW,)))
    bank = sorted(
        map(Prompt.load, run.prompts.glob("*.json")),
        key=lambda prompt: (len(prompt.name), prompt.name),
    )
    systems += [
        System(f"bank:{p.name}", "prompt", BASE, prompt=p) for p in bank if p.name != ZERO_SHOT.name
    ]
    systems += _policies(run)
    by_name = {system.name: system for system in systems}
    for key, names in (("demos", demos), ("actors", actors)):
        for name in names:
            if name in by_name or not name or "/" in name or name.startswith("."):
                raise ConfigError(
                    f"{key}: {name!r} is in use or invalid; choose a new name without '/' or leading '.'"
                )
            by_name[name] = System(name, "prompt", BASE, prompt=ZERO_SHOT)
    for name, path in demos.items():
        saved = saved_policies(Path(path))
        if saved:
            _refuse_keys(saved, run, f"demos.{name}: {path}")
        prompted = replace(by_name[name], prompt=Prompt.load(Path(path)))
        by_name[name] = replace(prompted, policy=name, settings=saved) if saved else prompted
    by_name |= {
        n: replace(by_name[n], policy=n, settings={"": actor}, rivals=(RAW,))
        for n, actor in actors.items()
    }
    for retriever, (name, system) in product(retrievers, list(by_name.items())):
        if name != RM3:
            rivals = (name, *(f"{rival}@{retriever}" for rival in system.rivals))
            other = f"{name}@{retriever}"
            by_name[other] = replace(system, name=other, retriever=retriever, rivals=rivals)
    return by_name


def _refuse_keys(policies: Mapping[str, PolicySettings], run: Run, origin: str) -> None:
    """Raise ConfigError if a saved program sends a key to a server that does not get it from the run's recipe."""
    for variable, urls in {*secrets_in(policies)}.difference(secrets_in(sampling_recipe_of(run))):
        if variable in os.environ:
            raise ConfigError(
                f"{origin} sends the key in ${variable} to {urls}; if you trust it, name its policy under `actors` "
                f"instead, or unset {variable}"
            )


def select(
    names: Sequence[str], systems: Mapping[str, System], demos: Sequence[str] = ()
) -> list[System]:
    """Return the systems that a recipe names, each once, in the report's order; ConfigError for unknown names."""
    wanted = set(demos)
    problems = []
    for name in names:
        if name == "bank":
            wanted |= {
                s.name
                for s in systems.values()
                if s.name.startswith("bank:") and s.retriever is None
            }
        elif name == "policies":
            wanted |= {
                s.name for s in systems.values() if s.kind == "policy" and s.retriever is None
            }
        elif name in systems:
            wanted.add(name)
        elif name.startswith(_REMOVED):
            problems.append(
                f"systems: {name!r} is no longer evaluated; remove it, or use an earlier version of leret"
            )
        else:
            hint = nearest(name, systems) or ";"
            problems.append(
                f"systems: unknown system {name!r}{hint} available: {', '.join(systems)}"
            )
    if problems:
        raise ConfigError(problems)
    mentioned = {systems[name].retriever for name in wanted}
    wanted |= {
        s.name for s in systems.values() if s.method in wanted and s.retriever not in mentioned
    }
    return [system for system in systems.values() if system.name in wanted]


def focus(systems: Sequence[System], values: Mapping[str, float] | None = None) -> str | None:
    """Return the policy to report and deliver: the one with the highest value, or the last if ``values`` is missing.

    A control is returned only if there are no other policies.
    """
    policies = [
        system for system in systems if system.kind == "policy" and system.retriever is None
    ]
    heroes = [system.name for system in policies if not system.control] or [
        system.name for system in policies
    ]
    return max(reversed(heroes), key=lambda name: (values or {}).get(name, 0.0), default=None)


def training_facts(run: Run) -> dict[str, dict[str, Any]]:
    """Map each fully trained policy to its training.json; a policy comes after the policy it was trained from."""
    facts = {}
    for path in sorted(run.policies.glob("*/training.json")):
        try:
            if not path.parent.name.startswith("."):
                facts[path.parent.name] = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error}); delete {path.parent} and train again"
            ) from error

    def depth(name: str) -> int:
        parent = facts[name].get("parent")
        return 1 + depth(parent) if parent in facts else 0

    return {name: facts[name] for name in sorted(facts, key=lambda name: (depth(name), name))}


def _policies(run: Run) -> list[System]:
    facts = training_facts(run)
    recipes = {name: (fact.get("key") or {}).get("recipe") or {} for name, fact in facts.items()}
    controlled = {name: recipe.get("match_steps_of") for name, recipe in recipes.items()}
    systems = []
    for name, fact in facts.items():
        rivals = [fact["parent"]] if fact.get("parent") in facts else []
        rivals += [control for control, of in controlled.items() if of == name]
        control = controlled[name] is not None or recipes[name].get("targets") == "random"
        recipe, directory = recipes[name], run.policies / name
        joint = {
            actor: recipe[actor] for actor in ("picker", "writer") if (directory / actor).is_dir()
        }
        trained = {directory / actor: section for actor, section in joint.items()} or {
            directory: recipe
        }
        answered = {
            path: tuple(section.get("predictors") or ()) for path, section in trained.items()
        }
        system = System(
            name, "policy", name, prompt=ZERO_SHOT, rivals=(*rivals, RAW), control=control
        )
        systems.append(replace(system, directories=answered))
    return systems
