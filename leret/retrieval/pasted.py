"""A query as a site gets it when a user pastes it into the search box."""

from __future__ import annotations

import re

__all__ = ["pasted"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def pasted(query: str) -> str:
    r"""One line, operators and quotes as they are; control characters and halves of surrogate pairs become a space.

    >>> pasted('("heart attack"[MeSH]\nAND aspirin) ')
    '("heart attack"[MeSH] AND aspirin)'
    """
    return _CONTROL.sub(" ", query).strip()
