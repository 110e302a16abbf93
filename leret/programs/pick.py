"""`leret.Pick`: a step of a program that chooses one of several candidates instead of writing a text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dspy

from leret.core.aio import submit
from leret.core.dspy_internals import carried_run
from leret.core.errors import ProgramError
from leret.core.types import STOP, Candidate, Passage
from leret.policies.base import Policy, Request
from leret.programs.needs import Candidates, ChoiceCall

_MAX_TOKENS = 64


class Pick(dspy.Module):
    """Picks one candidate; a picker (`leret.policies.pickers`) answers, or an LM that writes its id.

    Args:
        stop: whether to pick no more is an answer too.
        retrieves: what is picked counts as retrieved: a hop with that one passage, whose score is 1 for the first
            pick, 1/2 for the second, ...
        actor: answers outside of leret's runs, greedily; `leret.load` sets the one that a program was trained with.
    """

    def __init__(self, stop: bool = False, retrieves: bool = False, actor: Policy | None = None) -> None:
        super().__init__()
        self.stop = stop
        self.retrieves = retrieves
        self.actor = actor
        self._name = "pick"  # in the program, see `named_picks`

    def __call__(self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any) -> Candidate | None:
        """As ``forward``; without DSPy's bookkeeping while leret runs the program."""
        if carried_run() is not None:
            return type(self).forward(self, candidates, picked, **context)
        answer: Candidate | None = super().__call__(candidates, picked, **context)
        return answer

    def forward(self, candidates: Iterable[Any], picked: Sequence[Candidate] = (), **context: Any) -> Candidate | None:
        """Choose one.

        Args:
            candidates: texts, whose ids are their places; dicts with ``text`` and, if they have them, ``id``,
                ``title``, ``position`` and ``data``; passages; or `Candidate` objects.
            picked: before, in their order; they are not picked again.
            context: named values that the choice depends on (``question=...``).

        Returns:
            The chosen one; None where the answer is to stop, or nothing is left.

        Raises:
            ProgramError: the candidates cannot be read, two have one id, or nobody is there to answer.
        """
        own = vars(self)  # DSPy's modules look every attribute up by a method of their own
        watching = carried_run()
        given = candidates_of(candidates) if watching is None else watching.candidates(own["_name"], candidates)
        call = ChoiceCall(own["_name"], context, candidates=given, picked=tuple(picked), stop=own["stop"])
        if not call.is_open:
            return None
        chosen = self.ask(call) if watching is None else watching.choose(self, call)
        if chosen is STOP:
            return None
        if watching is not None and own["retrieves"]:
            passage = Passage(chosen.id, chosen.title, chosen.text, 1 / (1 + len(call.picked)))
            watching.add((chosen.id,), ((passage,),))
        return chosen

    def ask(self, call: ChoiceCall) -> Candidate:
        """The actor's greedy answer; AdapterParseError where it names no candidate."""
        if self.actor is None:
            raise ProgramError(
                f"the Pick {call.predictor} has no actor to answer it: set pick.actor = POLICY, or load the program "
                "with leret.load(DIRECTORY), which sets the one that it was trained with"
            )
        request = Request(call.messages, (0,), 0.0, _MAX_TOKENS, choice=call.choice, predictor=call.predictor)
        [completion] = submit(self.actor.complete(request)).result()
        return call.chosen(completion.text)

    def __deepcopy__(self, memo: dict[int, object]) -> Pick:
        return copy.copy(self)  # with the same actor


def named_picks(program: dspy.Module) -> dict[str, Pick]:
    """The picks of a program by their names in it, which they learn themselves and tell their copies."""
    picks = {name.removeprefix("self."): pick for name, pick in program.named_sub_modules(type_=Pick)}
    for name, pick in picks.items():
        pick._name = name
    return picks


def candidates_of(source: Iterable[Any]) -> Candidates:
    """What a program passes as candidates, in leret's words."""
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
