"""Calling a program's modules without what DSPy does around a call.

A call of a ``dspy.Module`` collects callbacks, notes its callers and opens a context of settings. None of that can
change what a replayed program does, since neither its LM nor its retriever is asked, and all of it is paid for every
module of every replay: more than everything else in one together.
"""

from __future__ import annotations

from typing import Any

import dspy

__all__ = ["unwrap"]


def unwrap(program: dspy.Module) -> None:
    """Let calls of a program and of the modules in it go straight to ``forward``.

    Args:
        program: a module of its own for this; its modules become instances of subclasses of their classes. A class
            with a ``__call__`` of its own keeps it.
    """
    for _, module in program.named_sub_modules(type_=dspy.Module):
        kind = type(module)
        call = _CALLS.get(kind.__call__)
        if call is not None:
            made: Any = type(kind)
            names = {"__call__": call, "__module__": kind.__module__}
            if kind.__getattribute__ is dspy.Module.__getattribute__:
                names["__getattribute__"] = object.__getattribute__  # DSPy's looks for who calls forward, to warn
            module.__class__ = made(kind.__name__, (kind,), names)


class _Module:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class _Predictor:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return dspy.Predict.__call__(self, *args, **kwargs)  # says what is wrong with it
        return self.forward(**kwargs)


_CALLS: dict[Any, Any] = {
    dspy.Module.__call__: _Module.__call__,
    dspy.Predict.__call__: _Predictor.__call__,
}
