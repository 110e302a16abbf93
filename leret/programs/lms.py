"""LMs that a program calls besides those of its predictors: frozen, asked once a path, recorded like searches."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import dspy

from leret.core.dspy_internals import StandInLM, watching_run
from leret.core.errors import LeretError, PolicyError, reason


def recorded_lm(lm: dspy.BaseLM) -> dspy.BaseLM:
    """Return a copy of an LM that the watching run answers: equal requests are sent, and counted, once."""
    kind: Any = type(lm)
    if isinstance(lm, StandInLM) or getattr(kind, "is_recorded", False):
        return lm

    class Recorded(kind):
        is_recorded = True

        def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
            request = partial(kind.__call__, self, prompt, messages=messages, **kwargs)
            run = watching_run()
            if run is None:
                return request()
            settings = {name: value for name, value in self.kwargs.items() if "key" not in name}
            ask = partial(copy_context().run, _ask, self.model, request)
            return run.call_tool(f"LM {self.model}", [settings, prompt, messages, kwargs], ask)

        async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
            return self(prompt, messages=messages, **kwargs)

    copied: dspy.BaseLM = lm.copy()
    copied.__class__ = Recorded
    return copied


def record_lms(program: dspy.Module) -> None:
    """Replace the LMs that a program's modules hold, except predictors', by recorded ones."""
    for _, module in program.named_sub_modules():
        for name, value in list(vars(module).items()):
            if not (isinstance(module, dspy.Predict) and name == "lm"):
                vars(module)[name] = _with_recorded(value)


def _with_recorded(value: Any) -> Any:
    if isinstance(value, dspy.BaseLM):
        return recorded_lm(value)
    if type(value) in (list, tuple) and any(isinstance(one, dspy.BaseLM) for one in value):
        return type(value)(map(_with_recorded, value))
    if type(value) is dict and any(isinstance(one, dspy.BaseLM) for one in value.values()):
        return {name: _with_recorded(one) for name, one in value.items()}
    return value


def _ask(model: str, request: Callable[[], Any]) -> Any:
    spend = dspy.settings.get("_leret_spend")
    if spend is not None:
        spend()
    try:
        with dspy.context(callbacks=[], _leret_run=None):
            return request()
    except LeretError:
        raise
    except Exception as error:
        raise PolicyError(f"{model}: {reason(error)}") from error
