"""The files of a batch job: a line a request going in, a line a request coming out, in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leret.http import MALFORMED

__all__ = ["Outcome", "is_whole", "outcomes_of", "request_lines"]

_PASSING = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request.

    Attributes:
        body: of the answer; None where there is none.
        reason: why there is none.
        again: asking once more may help.
    """

    body: str | None
    reason: str = ""
    again: bool = False


def request_lines(bodies: Mapping[str, str]) -> str:
    """The file that is uploaded.

    Args:
        bodies: JSON of chat requests, by a key of 64 characters at most.
    """
    return "".join(f'{{"custom_id":{json.dumps(key)},"body":{body}}}\n' for key, body in bodies.items())


def outcomes_of(text: str) -> dict[str, Outcome]:
    """What an output or an error file says, by key. Lines that cannot be read are left out: they are asked again."""
    outcomes = {}
    for line in text.split("\n"):  # a text may hold other ends of lines
        try:
            entry = json.loads(line)
            outcomes[str(entry["custom_id"])] = _outcome(entry)
        except MALFORMED:
            continue
    return outcomes


def is_whole(text: str) -> bool:
    """Whether a file came to its end: its last line can be read."""
    last = text.rstrip().rpartition("\n")[2]
    try:
        return not last or json.loads(last) is not None
    except MALFORMED:
        return False


def _outcome(entry: Mapping[str, Any]) -> Outcome:
    response, error = entry.get("response") or {}, entry.get("error")
    body, status = response.get("body"), int(response.get("status_code") or 200)
    if body is not None and status < 300 and not error:
        return Outcome(json.dumps(body))
    if not error:
        error = (body or {}).get("error") or body or "no answer"
    told = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)
    code = error.get("code") or error.get("status_code") if isinstance(error, Mapping) else None
    if isinstance(code, int) and status < 300:
        status = code
    # Who sends no code refuses: asking again, and paying again, is for the next run.
    return Outcome(None, told, again=status in _PASSING or status >= 500)
