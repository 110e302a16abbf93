"""Comparing two places that a program should come to twice, and showing how they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dspy

from leret.programs.needs import Finished, NeedsCompletion, NeedsSearch, Step, encode_sorted, plain_json

_SHOWN = 160
"""Characters of a value in a message."""


def place(need: NeedsCompletion | NeedsSearch | Finished) -> Any:
    """Return a key of a place: the question asked or the prediction, with the documents found before it."""
    if isinstance(need, NeedsSearch):
        return need.key
    documents = [[passage.doc_id for passage in added] for search in need.searches for added in search.added]
    if isinstance(need, NeedsCompletion):
        return need.key, documents
    value = need.prediction
    return repr(value) if isinstance(value, Exception) else encode_sorted(plain_json(_fields(value))), documents


def difference(before: NeedsCompletion | NeedsSearch | Finished, now: NeedsCompletion | NeedsSearch | Finished) -> str:
    """Describe the difference between two places that should be one, with both values."""
    if isinstance(before, NeedsCompletion) and isinstance(now, NeedsCompletion) and before.predictor == now.predictor:
        if before.key != now.key:
            return _changed(before.predictor, before.inputs, now.inputs)
        return f"the searches before {before.predictor} found {place(before)[1]} and then {place(now)[1]}"
    return f"it came to {_shown(before)} and then to {_shown(now)}"


def asked_instead(step: Step, needs: Iterable[NeedsCompletion | NeedsSearch]) -> str:
    """Describe the call that a program makes in place of a step of its path."""
    name = step.call.predictor
    now = next((need.inputs for need in needs if isinstance(need, NeedsCompletion) and need.predictor == name), None)
    if now is None:
        return f"{name} was asked for {_short(step.call.values)}, and is no longer on the same path"
    return _changed(name, step.call.values, now)


def _shown(need: NeedsCompletion | NeedsSearch | Finished) -> str:
    match need:
        case NeedsCompletion():
            return f"a call of {need.predictor} for {_short(need.inputs)}"
        case NeedsSearch():
            return f"a search for {_short(need.key)}"
        case Finished():
            return f"its end with {_short(_fields(need.prediction))}"


def _changed(predictor: str, before: Any, now: Any) -> str:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{predictor} was asked {_short(before)}, and on the same path {_short(now)}"
    name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if name is None:
        return f"{predictor} was called in other ways with the same inputs"
    return f"{predictor}.{name} was {_short(before.get(name))}, and on the same path {_short(now.get(name))}"


def _fields(prediction: Any) -> Any:
    return dict(prediction.items()) if isinstance(prediction, dspy.Example) else prediction


def _short(value: Any) -> str:
    text = encode_sorted(plain_json(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
