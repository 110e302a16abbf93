"""DSPy's adapters by their recipe names."""

from __future__ import annotations

import dspy

from leret.config import AdapterSettings
from leret.pipelines.compact import CompactAdapter

__all__ = ["make_adapter"]


class PlainJSONAdapter(dspy.JSONAdapter):
    """DSPy's, but that it sends no ``response_format``: a policy in this process and the sampler take none."""

    __call__ = dspy.ChatAdapter.__call__
    acall = dspy.ChatAdapter.acall


def make_adapter(settings: AdapterSettings) -> dspy.Adapter:
    """The adapter that a recipe names.

    The chat adapter's silent second call through JSON is off: one state and one seed are one call, and a completion
    that does not parse is a fact to record.
    """
    match settings.kind:
        case "compact":
            return CompactAdapter(settings.words_per_item, settings.items, settings.demo_items, settings.instructions)
        case "json":
            return PlainJSONAdapter()
        case "xml":
            return dspy.XMLAdapter()
        case "chat":
            return dspy.ChatAdapter(use_json_adapter_fallback=False)
