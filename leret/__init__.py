"""leret teaches DSPy programs to search by trying.

Names are loaded on first use, so importing leret imports neither torch nor dspy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CompactAdapter": "leret.programs.adapters",
    "Found": "leret.programs.search",
    "LM": "leret.optimize.provider",
    "LeReT": "leret.optimize.teleprompter",
    "LeretError": "leret.core.errors",
    "Pick": "leret.programs.pick",
    "PrefilledChatAdapter": "leret.programs.prefill",
    "PrefilledJSONAdapter": "leret.programs.prefill",
    "Provider": "leret.optimize.provider",
    "Search": "leret.programs.search",
    "load": "leret.programs.saved",
    "save": "leret.programs.saved",
    "search_tool": "leret.programs.search",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'leret' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
