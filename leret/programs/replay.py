"""Running a program as a function of its completions.

A program is run from its start at every step, with the completions of the steps before: neither an LM nor a retriever
is asked on the way, so a run takes a fraction of a millisecond, and any state can be reached again from what is stored.

Nothing of DSPy or of the user's program is replaced for that: what is replayed is a copy, whose predictors have a
stand-in for their LM and, where they are plain ``dspy.Predict``, a class without DSPy's bookkeeping. A proxy around
the adapter in ``dspy.settings`` sees every call of a predictor, with the signature, demos and inputs that the program
gives it; it returns the recorded outputs, or stops the program where there are none. A call that passes the adapter by
(another one set inside ``forward``, or the LM called directly) ends in the stand-in for the LM. The run is carried in
``dspy.settings``, which reach the threads of ``dspy.Parallel``, and recorded outputs are found by what is asked, so
order and threads do not matter.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NoReturn, cast

import dspy

from leret.core.aio import muted
from leret.core.dspy_internals import (
    QUIET,
    AdapterParseError,
    AdapterProxy,
    StandInLM,
    calling_predictor,
    carrying,
    current_adapter,
    forward_of,
    lm15,
    messages_of,
    one_call,
    passes,
    prediction_of,
    settings_here,
    text_response,
    watching_run,
)
from leret.core.errors import USER_ERRORS, ProgramError, ReplayError, raised
from leret.core.types import Candidate, Ranking, Task
from leret.programs.lms import record_lms, recorded_lm
from leret.programs.needs import (
    REPEATABLE,
    Candidates,
    ChoiceCall,
    Finished,
    NeedsCompletion,
    NeedsSearch,
    PredictorCall,
    Step,
    asked_instead,
    need_of,
    order,
    tool_key,
)
from leret.programs.pick import Pick, candidates_of, named_picks
from leret.programs.search import SearchCall, as_rm
from leret.retrieval.base import Retriever

SearchResults = dict[Any, Any]
"""What searches answered on one path: rankings by (query, k), results of search tools by (name, arguments)."""

_SETTLE_S, _STARVED_S = 0.01, 0.1
"""Seconds without news after which threads are taken to stand: older ones than the pass, and those that it started."""

_LONGEST_S = 1.0
"""Seconds that they have to use the steps of the path."""


_own_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that programs have started themselves."""


class Stop(BaseException):
    """Ends a program, or an adapter's call, where it stands; not an Exception: their own handlers let it pass."""


class Replay:
    """Runs one program many times; one at a time.

    Args:
        program: a module of its own for this: its predictors get a stand-in for their LM.
        adapter: of the calls; by default that of ``dspy.settings``, else DSPy's own.
        rm: what ``dspy.settings.rm`` is for the program; by default the retriever of the run.
    """

    def __init__(
        self,
        program: dspy.Module,
        adapter: dspy.Adapter | None = None,
        rm: Any = None,
    ) -> None:
        self.program = program
        self.whole_adapter = adapter or current_adapter()
        self.adapter = one_call(self.whole_adapter)
        self.predictors: dict[str, dspy.Predict] = dict(program.named_predictors())
        self.picks = named_picks(program)
        self.names = (*self.predictors, *self.picks)
        """Of all steps that the program has when it is constructed."""
        if not self.names:
            raise ProgramError(
                f"{type(program).__name__} has no predictor to train; use dspy.Predict, ChainOfThought or leret.Pick"
            )
        methods = [callable(getattr(type(program), name, None)) for name in ("forward", "aforward")]
        self.is_async = methods == [False, True]
        self._predictor_names = {id(predictor): name for name, predictor in self.predictors.items()}
        self._inputs = input_names(program)
        self._fields = {name: predictor.signature.input_fields.keys() for name, predictor in self.predictors.items()}
        self.proxy = AdapterProxy(self.adapter, _answer_call)
        self._guard = StandInLM.of("", "replay", partial(_answer_request, ""))
        record_lms(program)
        stand_ins: dict[str, StandInLM] = {}  # predictors that share an LM share its stand-in, as DSPy expects
        for name, predictor in self.predictors.items():
            lm = predictor.lm
            asked = "" if lm is None else repr((lm.model, lm.kwargs, id(getattr(lm, "engine", None))))
            if asked not in stand_ins:
                stand_ins[asked] = StandInLM.of(name, "replay", partial(_answer_request, name))
            predictor.lm = stand_ins[asked]
            if type(predictor) is dspy.Predict and not predictor.config:
                predictor.__class__ = _QuickPredict  # of this module of its own; ten times as fast
        self.rm = as_rm if rm is None else rm
        self._forward = self._forward_of(program)
        self._settings = {**QUIET, "adapter": self.proxy, "lm": self._guard, "rm": self.rm}
        # These count failures on themselves, so one instance is no function of its completions.
        self._fresh = any(isinstance(m, dspy.Refine | dspy.BestOfN) for _, m in program.named_sub_modules())
        # A program with both may bridge them by asyncio.run, which needs a thread without an event loop.
        self._thread = ThreadPoolExecutor(1, "leret-replay") if methods[1] else None

    def run(
        self,
        task: Task,
        steps: Sequence[Step],
        results: SearchResults,
        retrieve: Callable[[str, int], Ranking | None] | None = None,
    ) -> NeedsCompletion | NeedsSearch | Finished:
        """Run from the start with the first completions.

        Args:
            task: whose inputs the program gets.
            steps: of the path so far.
            results: answers of searches; what is answered at once is added.
            retrieve: the run's retriever: answers a search at once, or returns None where it cannot. Where there is
                none, every `leret.Search` has its own.

        Returns:
            What is missing next, or the program's prediction.

        Raises:
            ProgramError: the program failed, or asks for other completions than those of the path.
        """
        inputs = bind(self._inputs, task)
        run = ProgramRun(self, steps, results, retrieve)
        while True:
            try:
                if self._thread is None:
                    self._pass(run, inputs)
                else:
                    self._thread.submit(copy_context().run, self._pass, run, inputs).result()
                return run.outcome(task)
            except RuntimeError as error:  # asyncio.run within forward: needs a thread without an event loop
                if self._thread is not None or "running event loop" not in str(error):
                    raise
                self._thread = ThreadPoolExecutor(1, "leret-replay")
                run = ProgramRun(self, steps, results, retrieve)

    def _pass(self, run: ProgramRun, inputs: Mapping[str, Any]) -> None:
        program, forward = self.program, self._forward
        run._home, run._before = threading.get_ident(), threading.enumerate()
        passes.append(run)
        if self._fresh:
            program = program.deepcopy()
            forward = self._forward_of(program)
            run.names = {id(predictor): name for name, predictor in program.named_predictors()}
        settings = {**self._settings, "caller_modules": [program], "trace": []}
        try:
            with carrying(run, settings), muted():  # it is run many times, and prints the same
                run.prediction = asyncio.run(forward(**inputs)) if self.is_async else forward(**inputs)
        except Stop:
            pass
        except USER_ERRORS as error:
            if isinstance(error, RuntimeError) and self._thread is None and "running event loop" in str(error):
                raise
            run.crash = error
        finally:
            passes.remove(run)

    def _forward_of(self, program: dspy.Module) -> Callable[..., Any]:
        return program.acall if self.is_async else forward_of(program)

    def name_of(self, signature: Any) -> str:
        """The name of a predictor that the program makes on the way; a copy is known by its signature."""
        if signature is None:
            return "(direct)"
        same = [name for name, own in self.predictors.items() if own.signature.equals(signature)]
        return same[0] if len(same) == 1 else f"({signature.__name__})"


class _QuickPredict(dspy.Predict):
    """A predictor that asks the run without DSPy's bookkeeping, where it is called with its inputs and no more."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = settings_here()
        run: Any = settings.get("_leret_run")
        watched = isinstance(run, ProgramRun) and not args and settings["send_stream"] is None
        name = run.names.get(id(self)) if watched else None
        if name is None or settings["adapter"] is not run.replay.proxy or run.replay._fields[name] != kwargs.keys():
            return super().__call__(*args, **kwargs)
        own = vars(self)  # DSPy's modules look every attribute up by a method of their own
        signature = own["signature"]
        call = PredictorCall(name, kwargs, True, run.replay.adapter, own["lm"], {}, signature, demos=own["demos"])
        prediction = prediction_of(run.outputs(call), signature)
        settings["trace"].append((self, kwargs, prediction))
        return prediction


class ProgramRun:
    """One pass of a program over a path; `leret.Search` and search tools find it in ``dspy.settings``."""

    def __init__(
        self,
        replay: Replay,
        steps: Sequence[Step],
        results: SearchResults,
        retrieve: Callable[[str, int], Ranking | None] | None,
    ) -> None:
        self.replay, self.steps, self.results, self._retrieve = replay, steps, results, retrieve
        self.names: Mapping[int, str] = replay._predictor_names
        self.searches: list[SearchCall] = []
        self.needs: list[NeedsCompletion | NeedsSearch] = []
        self.prediction: Any = None
        self.crash: BaseException | None = None
        self._left = list(steps)
        self._stopped: set[int | None] = set()
        self._errors: list[Exception] = []
        self._home = 0  # the thread of the pass
        self._before: list[threading.Thread] = []  # that are older than it
        self._side_threads = False  # dspy.Parallel's, which come to the same place in any order
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ what the program does on the way

    def answer(
        self, adapter: Any, lm: Any, config: Any, signature: Any, demos: Any, inputs: Any
    ) -> list[dict[str, Any]]:
        """Return the recorded outputs of a call of the adapter; an LM that is no stand-in is asked like a search."""
        if not isinstance(lm, StandInLM):
            whole = self.replay.whole_adapter if adapter is self.replay.adapter else adapter
            return cast(list[dict[str, Any]], whole(recorded_lm(lm), config, signature, demos, inputs))
        replay, predictor = self.replay, calling_predictor()
        name = self.names.get(id(predictor)) or replay.name_of(signature)
        own = predictor is not None and signature is predictor.signature
        usual = own and not config and adapter is replay.adapter and demos == predictor.demos and name[0] != "("
        wording = "" if own else signature.instructions
        if name in replay.predictors and lm.owner != replay.predictors[name].lm.owner:
            usual, wording = False, f"{wording} asked of the LM of {lm.owner or 'dspy.settings'}"
        if (config.get("n") or getattr(lm, "kwargs", {}).get("n") or 1) > 1:
            self.stop(ProgramError(f"{name} asks for n > 1 completions in one call; ask for one, several times"))
        if dspy.settings.send_stream is not None:
            self.stop(ProgramError(f"{name} streams its completion; call the program without dspy.streamify"))
        return self.outputs(PredictorCall(name, inputs, usual, adapter, lm, config, signature, wording, demos))

    def outputs(self, call: PredictorCall) -> list[dict[str, Any]]:
        """The recorded outputs of a call; stops the program where there are none."""
        if self._stopped:
            self._go_no_further()
        step = self._take(call) if self._left else None
        if step is None:
            self.stop(need_of(call, self.found))
        if isinstance(step.outputs, AdapterParseError):
            raise step.outputs.with_traceback(None)
        return copy.deepcopy(step.outputs) if step.is_nested else [dict(fields) for fields in step.outputs]

    def answer_direct(self, request: lm15.Request, owner: str = "") -> lm15.Response:
        """Return the recorded text of a call that passed the adapter by, to the LM of the predictor ``owner``."""
        self._go_no_further()
        predictor = calling_predictor()
        name = self.names.get(id(predictor)) or self.replay.name_of(getattr(predictor, "signature", None))
        call = PredictorCall(name, {"messages": list(messages_of(request))}, request=request)
        call.lm = StandInLM.of(owner, "direct", lambda request: text_response(request, ""))
        step = self._take(call)
        if step is None:
            self.stop(NeedsCompletion(call, self.found))
        return text_response(request, step.text or "")

    def search(self, query: str, k: int, retriever: Retriever | None = None) -> Ranking:
        """The known answer of the retriever; stops the program where there is none."""
        if self._stopped:
            self._go_no_further()
        own = None if self._retrieve is not None else retriever
        key = (query, k) if own is None else (query, k, id(own))
        ranking: Ranking | None = self.results.get(key)
        if ranking is None:
            try:
                ranking = None if self._retrieve is None else self._retrieve(query, k)
            except Exception as error:
                self.stop(error)
            if ranking is None:
                self.stop(NeedsSearch(key, query, k, own))
            self.results[key] = ranking
        return ranking

    def call_tool(self, name: str, arguments: Any, ask: Callable[[], Any]) -> Any:
        """The known result of a search tool; stops the program where there is none."""
        self._go_no_further()
        key = tool_key(name, arguments)
        if key not in self.results:
            self.stop(NeedsSearch(key, ask=ask))
        return copy.deepcopy(self.results[key])

    def candidates(self, name: str, source: Iterable[Any]) -> Candidates:
        """Those of a pick, read once a path as long as the program passes the same ones."""
        items = tuple(source)
        known = self.results.get(("candidates", name))
        if known is None or known[0] != items:
            known = self.results["candidates", name] = items, candidates_of(items)
        return cast(Candidates, known[1])

    def choose(self, pick: Pick, call: ChoiceCall) -> Candidate:
        """The recorded answer to a pick; stops the program where there is none."""
        [fields] = self.outputs(call)
        return call.chosen(fields["id"])

    def add(self, queries: tuple[str, ...], added: tuple[Ranking, ...]) -> None:
        """Note what a search brought."""
        self._side_threads |= threading.get_ident() != self._home
        self.searches.append(SearchCall(len(self.steps) - len(self._left), queries, added))

    # ------------------------------------------------------------------ what came of it

    @property
    def found(self) -> tuple[SearchCall, ...]:
        """The searches in order; of several threads, in the order of their queries."""
        if not self._side_threads:
            return tuple(self.searches)
        ordered = sorted(self.searches, key=lambda search: search.queries)
        return tuple([search._replace(n_steps=min(n, len(self.steps))) for n, search in enumerate(ordered, start=1)])

    def outcome(self, task: Task) -> NeedsCompletion | NeedsSearch | Finished:
        """Where the program stands."""
        if self._side_threads:
            self._settle()
        if self._errors:
            raise self._errors[0]
        missing = self._left
        program = type(self.replay.program).__name__
        if self.needs and not (missing and isinstance(self.needs[0], NeedsCompletion)):
            need = self.needs[0] if len(self.needs) == 1 else min(self.needs, key=order)
            if isinstance(need, NeedsCompletion) and self._side_threads:
                return need_of(need.call, self.found)
            return need
        if missing and self.crash is None:
            raise ReplayError(
                f"{program} is not deterministic given its completions: {asked_instead(missing[0], self.needs)}; "
                f"{REPEATABLE}"
            )
        if isinstance(self.crash, AdapterParseError) and self.steps and self.steps[-1].outputs is self.crash:
            return Finished(self.crash, self.found)
        if self.crash is not None:
            raise ProgramError(
                f"{program} failed on {task.text!r} after {len(self.steps) - len(missing)} completions: "
                f"{raised(self.crash)}"
            ) from self.crash
        return Finished(self.prediction, self.found)

    def stop(self, why: NeedsCompletion | NeedsSearch | Exception) -> NoReturn:
        if isinstance(why, Exception):
            self._errors.append(why)
        else:
            self.needs.append(why)
        if threading.get_ident() == self._home:
            self._stopped.add(_task())
        else:
            self._side_threads = True
        raise Stop

    def refuse_own_thread(self) -> None:
        """Refuse a call in a thread that the program has started itself, which no run reaches."""
        thread = threading.current_thread()
        if thread in _own_threads or thread not in self._before:
            _own_threads.add(thread)
            error = ProgramError(
                f"{type(self.replay.program).__name__} searches or asks an LM in a thread of its own, where leret does "
                "not see it: such threads do not carry DSPy's context; use dspy.Parallel, or start them with "
                "contextvars.copy_context().run"
            )
            self._errors.append(error)
            raise error

    def _go_no_further(self) -> None:
        """A program that swallows the stop (a bare ``except``) meets it again at its next call or search."""
        if threading.get_ident() == self._home and _task() in self._stopped:
            raise Stop

    def _settle(self) -> None:
        """Wait until the threads that the program has started end, or nothing is heard of them or of older ones."""
        news, deadline = None, time.monotonic() + _LONGEST_S
        while True:
            started = [one for one in threading.enumerate() if one not in self._before and one.ident is not None]
            if started:
                started[0].join(_STARVED_S)
                if not started[0].is_alive():
                    continue
            else:
                time.sleep(_SETTLE_S)
            is_quiet = news == (news := (len(self.needs), len(self._left)))
            if is_quiet and not (self._left and time.monotonic() < deadline):
                return

    def _take(self, call: PredictorCall) -> Step | None:
        """The first step that is left of those that answer such a call."""
        with self._lock:
            for place, step in enumerate(self._left):
                other = step.call
                same = call.usual and other.usual and call.predictor == other.predictor and call.inputs == other.inputs
                if same or other.asks_as(call):
                    return self._left.pop(place)
        return None


def _answer_call(adapter: Any, lm: Any, config: Any, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
    return _current().answer(adapter, lm, config, signature, demos, inputs)


def _answer_request(owner: str, request: lm15.Request) -> lm15.Response:
    return _current().answer_direct(request, owner)


def _current() -> ProgramRun:
    return cast(ProgramRun, watching_run())


def _task() -> int | None:
    try:
        return id(asyncio.current_task())
    except RuntimeError:
        return None


def input_names(program: dspy.Module) -> tuple[str, ...]:
    """The arguments of ``forward`` that take a task's inputs: those without a default, or ``question``."""
    kind = type(program)
    method = getattr(kind, "forward", None) or getattr(kind, "aforward", None)
    if method is None:
        raise ProgramError(f"{kind.__name__} has neither forward nor aforward")
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = tuple(name for name, p in parameters.items() if p.default is p.empty and p.kind in kinds)
    if "question" in parameters and set(required) <= {"question"}:
        return ("question",)
    if not required and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ProgramError(
            f"{kind.__name__}.forward takes {', '.join(parameters) or 'nothing'}; it must take the task's "
            "inputs by name, or a question as `question` or as its only argument without a default"
        )
    return required


def bind(names: Sequence[str], task: Task) -> Mapping[str, Any]:
    """A task's inputs by argument: a single one goes to the only argument, whatever its name."""
    return dict(zip(names, task.inputs.values(), strict=True)) if len(names) == len(task.inputs) == 1 else task.inputs


def bound_inputs(program: dspy.Module, task: Task) -> Mapping[str, Any]:
    """A task's inputs by the arguments of the program's ``forward``."""
    return bind(input_names(program), task)
