"""`leret.Pick`: a step of a program that chooses one of several candidates instead of writing a text."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dspy

from leret.core.aio import submit
from leret.core.dspy_internals import AdapterParseError, carried_run
from leret.core.errors import ProgramError
from leret.core.types import STOP, Candidate, Choice, Passage, json_encoder
from leret.policies.base import Policy, Request
from leret.programs.needs import PredictorCall, plain_json

_MAX_TOKENS = 64
_CHOICE = dspy.Signature("candidates -> id")
_encode = json_encoder(ensure_ascii=False)


@dataclass(frozen=True)
class Candidates:
    """The candidates of one call of a `leret.Pick`; ProgramError if two ids are equal."""

    items: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        if len(self.by_id) < len(self.items) or STOP.id in self.by_id:
            counts = Counter([*(one.id for one in self.items), STOP.id])
            raise ProgramError(f"two candidates of a Pick have the id {max(counts, key=counts.__getitem__)!r}")

    @cached_property
    def by_id(self) -> dict[str, Candidate]:
        return {one.id: one for one in self.items}

    @cached_property
    def text(self) -> str:
        return _encode({a.id: f"{a.title} | {a.text}" if a.title else a.text for a in self.items})


@dataclass(eq=False, kw_only=True)
class ChoiceCall(PredictorCall):
    """One question of a `leret.Pick`; ``inputs`` are its context."""

    candidates: Candidates
    picked: tuple[Candidate, ...] = ()
    stop: bool = False

    @cached_property
    def choice(self) -> Choice:  # type: ignore[override]
        left: Sequence[Candidate] = self.candidates.items
        if self.picked:
            left = [one for one in left if one.id not in self.picked_ids]
        return Choice(self.predictor, self.inputs, (*left, STOP) if self.stop else left, self.picked)

    @cached_property
    def picked_ids(self) -> dict[str, None]:
        return {one.id: None for one in self.picked}

    def chosen(self, text: str) -> Candidate:
        """Return the candidate that an answer names; AdapterParseError if it may not be picked."""
        name = text.strip().strip('"')
        if name == STOP.id and self.stop:
            return STOP
        candidate = self.candidates.by_id.get(name)
        if candidate is None or name in self.picked_ids:
            raise AdapterParseError(
                "Pick", _CHOICE, text, f"{name[:80]!r} is the id of no candidate of {self.predictor}"
            )
        return candidate

    @cached_property
    def context(self) -> dict[str, Any]:
        return {name: plain_json(value) for name, value in self.inputs.items()}

    @cached_property
    def values(self) -> dict[str, Any]:
        return self.context | {"candidates": list(self.candidates.by_id), "picked": list(self.picked_ids)}

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        context = _encode({**self.context, "picked": list(self.picked_ids)})
        stop = f", or with {STOP.id} to pick no more" if self.stop else ""
        rest = f"Answer with the id of one of the candidates that are not picked yet{stop}."
        return ({"role": "user", "content": f'{context[:-1]}, "candidates": {self.candidates.text}}}\n{rest}'},)

    @cached_property
    def key(self) -> str:
        return f"{self.predictor} {self.messages[0]['content']}"

    def asks_as(self, other: PredictorCall) -> bool:
        if not isinstance(other, ChoiceCall) or self.predictor != other.predictor or self.stop != other.stop:
            return False
        same = self.picked == other.picked and self.candidates == other.candidates
        return same and (self.inputs == other.inputs or self.context == other.context)


class Pick(dspy.Module):
    """Picks one candidate; a picker (`leret.policies.pickers`) answers, or an LM that writes its id.

    Args:
        stop: to pick no more is an answer too.
        retrieves: a picked candidate counts as retrieved: a hop with that one passage, with score 1 for the first
            pick, 1/2 for the second, ...
        actor: greedy policy outside leret's runs; `leret.load` sets the one that the program was trained with.
    """

    def __init__(self, stop: bool = False, retrieves: bool = False, actor: Policy | None = None) -> None:
        super().__init__()
        self.stop = stop
        self.retrieves = retrieves
        self.actor = actor
        self._name = "pick"  # `named_picks` sets it

    def __call__(self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any) -> Candidate | None:
        """Choose one, like ``forward``, but without DSPy's bookkeeping while leret runs the program."""
        if carried_run() is not None:
            return type(self).forward(self, candidates, picked, **context)
        answer: Candidate | None = super().__call__(candidates, picked, **context)
        return answer

    def forward(self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any) -> Candidate | None:
        """Choose one.

        Args:
            candidates: texts, with their places as ids; dicts with ``text`` and optionally ``id``, ``title``,
                ``position`` and ``data``; passages; or `Candidate` objects.
            picked: earlier picks in order; they are not picked again.
            context: named values that the choice depends on (``question=...``).

        Returns:
            The chosen candidate; None if the answer is to stop, or nothing is left.

        Raises:
            ProgramError: the candidates cannot be read, two have the same id, or there is no actor.
        """
        fields = vars(self)  # DSPy's modules look up attributes slowly
        watching, name = carried_run(), fields["_name"]
        items = candidates_of(candidates) if watching is None else watching.candidates(name, candidates)
        call = ChoiceCall(name, context, candidates=items, picked=tuple(picked), stop=fields["stop"])
        if items.by_id.keys() <= call.picked_ids.keys():
            return None
        chosen = self.ask(call) if watching is None else watching.choose(self, call)
        if chosen is STOP:
            return None
        if watching is not None and fields["retrieves"]:
            passage = Passage(chosen.id, chosen.title, chosen.text, 1 / (1 + len(call.picked)))
            watching.add((chosen.id,), ((passage,),))
        return chosen

    def ask(self, call: ChoiceCall) -> Candidate:
        if self.actor is None:
            raise ProgramError(
                f"the Pick {call.predictor} has no actor to answer it: set pick.actor = POLICY, or load the program "
                "with leret.load(DIRECTORY), which sets the actor that it was trained with"
            )
        request = Request(call.messages, (0,), 0.0, _MAX_TOKENS, choice=call.choice, predictor=call.predictor)
        [completion] = submit(self.actor.complete(request)).result()
        return call.chosen(completion.text)

    def __deepcopy__(self, memo: dict[int, object]) -> Pick:
        return copy.copy(self)  # with the same actor


def named_picks(program: dspy.Module) -> dict[str, Pick]:
    """Return the picks of a program by name; each pick keeps its name, and so do its copies."""
    picks = {name.removeprefix("self."): pick for name, pick in program.named_sub_modules(type_=Pick)}
    for name, pick in picks.items():
        pick._name = name
    return picks


def candidates_of(source: Iterable[Any]) -> Candidates:
    """Return the candidates that a program passes, in any of the forms of `Pick.forward`."""
    return Candidates(tuple([_candidate(place, item) for place, item in enumerate(source)]))


def _candidate(place: int, item: Any) -> Candidate:
    if isinstance(item, str):
        return Candidate(str(place), item, "", place)
    if isinstance(item, Candidate):
        return item
    if isinstance(item, Passage):
        return Candidate(item.doc_id, item.text, item.title)
    if isinstance(item, Mapping) and isinstance(item.get("text"), str):
        rest = str(item.get("title") or ""), item.get("position", place), item.get("data", {})
        return Candidate(str(item.get("id", place)), item["text"], *rest)
    raise ProgramError(
        f"a Pick takes texts, dicts with a text, passages or Candidate objects, and candidate {place} is {item!r:.80}"
    )
