"""`leret.Pick`: a program step that chooses one of several candidates instead of writing text."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
    """Candidates for one call of a `leret.Pick`; ProgramError if two have the same id."""

    items: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        if len(self.by_id) < len(self.items) or STOP.id in self.by_id:
            counts = Counter(candidate.id for candidate in (*self.items, STOP))
            [(id, _)] = counts.most_common(1)
            raise ProgramError(f"two candidates of a Pick have the id {id!r}")

    @cached_property
    def by_id(self) -> dict[str, Candidate]:
        return {candidate.id: candidate for candidate in self.items}

    @cached_property
    def text(self) -> str:
        texts = {}
        for candidate in self.items:
            text = candidate.text
            texts[candidate.id] = f"{candidate.title} | {text}" if candidate.title else text
        return _encode(texts)


@dataclass(eq=False, kw_only=True)
class ChoiceCall(PredictorCall):
    """One call of a `leret.Pick`; ``inputs`` holds the context."""

    candidates: Candidates
    picked: tuple[Candidate, ...] = ()
    stop: bool = False

    @cached_property
    def choice(self) -> Choice:  # type: ignore[override]
        left: Sequence[Candidate] = self.candidates.items
        if self.picked:
            left = [candidate for candidate in left if candidate.id not in self.picked_ids]
        if self.stop:
            left = (*left, STOP)
        return Choice(self.predictor, self.inputs, left, self.picked)

    @cached_property
    def picked_ids(self) -> dict[str, None]:
        return {candidate.id: None for candidate in self.picked}

    def chosen(self, text: str) -> Candidate:
        """Return the candidate that an answer names.

        Raises:
            AdapterParseError: it names none that is left.
        """
        name = text.strip().strip('"')
        if name == STOP.id and self.stop:
            return STOP
        candidate = self.candidates.by_id.get(name)
        if candidate is None or name in self.picked_ids:
            raise AdapterParseError(
                "Pick",
                _CHOICE,
                text,
                f"{name[:80]!r} is not the id of a candidate left for {self.predictor}",
            )
        return candidate

    @cached_property
    def context(self) -> dict[str, Any]:
        return {name: plain_json(value) for name, value in self.inputs.items()}

    @cached_property
    def values(self) -> dict[str, Any]:
        return self.context | {
            "candidates": list(self.candidates.by_id),
            "picked": list(self.picked_ids),
        }

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        context = _encode({**self.context, "picked": list(self.picked_ids)})
        stop = f", or with {STOP.id} to pick no more" if self.stop else ""
        rest = f"Answer with the id of one of the candidates that are not picked yet{stop}."
        content = f'{context[:-1]}, "candidates": {self.candidates.text}}}\n{rest}'
        return ({"role": "user", "content": content},)

    @cached_property
    def key(self) -> str:
        return f"{self.predictor} {self.messages[0]['content']}"

    def asks_as(self, call: PredictorCall) -> bool:
        if not isinstance(call, ChoiceCall):
            return False
        if self.predictor != call.predictor or self.stop != call.stop:
            return False
        if self.picked != call.picked or self.candidates != call.candidates:
            return False
        return self.inputs == call.inputs or self.context == call.context


class Pick(dspy.Module):
    """Picks one candidate, with a picker (`leret.policies.pickers`) or an LM that writes its id.

    Args:
        stop: whether the policy may stop instead of picking a candidate.
        retrieves: whether each picked candidate counts as a search that returned only this passage,
            with score 1 for the first pick, 1/2 for the second, and so on.
        actor: greedy policy for calls outside leret's runs; `leret.load` sets the policy from
            training.
    """

    def __init__(
        self, stop: bool = False, retrieves: bool = False, actor: Policy | None = None
    ) -> None:
        super().__init__()
        self.stop = stop
        self.retrieves = retrieves
        self.actor = actor
        self._name = "pick"  # set by `named_picks`

    def __call__(
        self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any
    ) -> Candidate | None:
        """Choose a candidate like ``forward``, without DSPy's bookkeeping in leret's runs."""
        if carried_run() is not None:
            return type(self).forward(self, candidates, picked, **context)
        answer: Candidate | None = super().__call__(candidates, picked, **context)
        return answer

    def forward(
        self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any
    ) -> Candidate | None:
        """Choose a candidate.

        Args:
            candidates: `Candidate` objects, passages, texts (their indices are the ids), or dicts
                with ``text`` and optionally ``id``, ``title``, ``position`` and ``data``.
            picked: earlier picks in order, which are not picked again.
            context: named values that the choice depends on, such as ``question=...``.

        Returns:
            The chosen candidate; None if the policy stops or no candidate is left.

        Raises:
            ProgramError: a candidate has the wrong type, two candidates have the same id, or there
                is no actor.
        """
        fields = vars(self)  # attribute lookup on DSPy modules is slow
        name = fields["_name"]
        stop = fields["stop"]
        watching = carried_run()
        if watching is None:
            items = candidates_of(candidates)
            choose = self.ask
        else:
            items = watching.candidates(name, candidates)
            choose = partial(watching.choose, self)
        call = ChoiceCall(name, context, candidates=items, picked=tuple(picked), stop=stop)
        if items.by_id.keys() <= call.picked_ids.keys():
            return None
        chosen = choose(call)
        if chosen is STOP:
            return None
        if watching is not None and fields["retrieves"]:
            passage = Passage(chosen.id, chosen.title, chosen.text, 1 / (1 + len(call.picked)))
            watching.add((chosen.id,), ((passage,),))
        return chosen

    def ask(self, call: ChoiceCall) -> Candidate:
        if self.actor is None:
            raise ProgramError(
                f"the Pick {call.predictor} has no actor: set pick.actor = POLICY, or load the program with "
                "leret.load(DIRECTORY), which sets the trained actor"
            )
        request = Request(
            call.messages, (0,), 0.0, _MAX_TOKENS, choice=call.choice, predictor=call.predictor
        )
        [completion] = submit(self.actor.complete(request)).result()
        return call.chosen(completion.text)

    def __deepcopy__(self, memo: dict[int, object]) -> Pick:
        return copy.copy(self)  # copies share the actor


def named_picks(program: dspy.Module) -> dict[str, Pick]:
    """Return a program's picks by name, and store the name on each pick.

    Copies of a pick keep the name.
    """
    picks = {}
    for place, pick in program.named_sub_modules(type_=Pick):
        name = place.removeprefix("self.")
        picks[name] = pick
        pick._name = name
    return picks


def candidates_of(source: Iterable[Any]) -> Candidates:
    """Convert the candidates that a program passes, in any form that `Pick.forward` accepts."""
    return Candidates(tuple([_candidate(place, item) for place, item in enumerate(source)]))


def _candidate(place: int, item: Any) -> Candidate:
    if isinstance(item, str):
        return Candidate(str(place), item, "", place)
    if isinstance(item, Candidate):
        return item
    if isinstance(item, Passage):
        return Candidate(item.doc_id, item.text, item.title, data={"score": item.score})
    if isinstance(item, Mapping) and isinstance(item.get("text"), str):
        id = str(item.get("id", place))
        title = str(item.get("title") or "")
        position = item.get("position", place)
        return Candidate(id, item["text"], title, position, item.get("data", {}))
    raise ProgramError(
        f"candidate {place} of a Pick is {item!r:.80}; "
        "pass texts, dicts with a text, passages or Candidate objects"
    )
