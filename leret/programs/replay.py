"""Run a program as a function of its completions.

Every step reruns a copy of the program from the start with the completions of earlier steps, in a
fraction of a millisecond. Stand-ins replace the predictors' LMs. A proxy around the adapter in
``dspy.settings`` returns the recorded outputs of a call, or stops the program. Calls that bypass
the adapter reach the stand-in LM. Recorded outputs are looked up by the inputs of the call, so
order and threads do not matter.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import dspy

from leret.core import dspy_internals as internals
from leret.core.dspy_internals import AdapterParseError, StandInLM, lm15
from leret.core.errors import USER_ERRORS, ProgramError, ReplayError, raised
from leret.core.types import Candidate, Ranking, Task
from leret.policies.tool_calls import ToolReader, read_calls
from leret.programs import needs
from leret.programs.load import input_names
from leret.programs.needs import Finished, Need, NeedsCompletion, NeedsSearch, PredictorCall, Step
from leret.programs.pick import Candidates, ChoiceCall, Pick, candidates_of, named_picks
from leret.programs.search import QuickSearch, Search, SearchCall, as_rm, record_lms, recorded_lm
from leret.retrieval.base import Retriever

SearchResults = dict[Any, Any]
"""Results of one path: rankings by (query, k), and search tool results by (name, arguments)."""

Retrieve = Callable[[str, int], Ranking | None]
"""Function that returns a ranking immediately, or None if the search would take time."""

MAX_STEPS = 64
_REPEATS = 4

_SETTLE_S = 0.01
"""Seconds without progress until older threads count as blocked."""
_STARVED_S = 0.1
"""Seconds without progress until the run's own threads count as blocked."""

_LONGEST_S = 1.0  # maximum wait for threads to use the recorded steps
_MUTED = internals.muted()  # otherwise every rerun would print the same output
_program_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Stop(BaseException):
    """Stops a program or an adapter call immediately.

    It is not an Exception, so that handlers do not catch it.
    """


class Replay:
    """Runs one program many times, one run at a time.

    Args:
        program: module that only this replay uses, because stand-ins replace the LMs of its
            predictors.
        adapter: adapter for the calls; by default ``dspy.settings.adapter``, or else DSPy's default
            adapter.
        rm: value of ``dspy.settings.rm`` for the program; by default the run's retriever.
        read: reads the native tool calls of a completion.
    """

    def __init__(
        self,
        program: dspy.Module,
        adapter: dspy.Adapter | None = None,
        rm: Any = None,
        read: ToolReader = read_calls,
    ) -> None:
        self.program = program
        self.read = read
        self.whole_adapter = adapter or internals.current_adapter()
        self.adapter = internals.one_call(self.whole_adapter)
        self.predictors: dict[str, dspy.Predict] = dict(program.named_predictors())
        self.picks = named_picks(program)
        self.names = (*self.predictors, *self.picks)
        if not self.names:
            raise ProgramError(
                f"{type(program).__name__} has no predictor to train; "
                "add dspy.Predict, ChainOfThought or leret.Pick"
            )
        has_forward = callable(getattr(type(program), "forward", None))
        has_aforward = callable(getattr(type(program), "aforward", None))
        self.is_async = has_aforward and not has_forward
        self._predictor_names: dict[int, str] = {}
        self._fields: dict[str, Any] = {}
        for name, predictor in self.predictors.items():
            self._predictor_names[id(predictor)] = name
            self._fields[name] = predictor.signature.input_fields.keys()
        self.stops = self._names_that_stop()
        self._inputs = input_names(program)
        self.proxy = internals.AdapterProxy(
            self.adapter, lambda *call: internals.watching_run().answer(*call)
        )
        record_lms(program)
        self._stand_in()
        for _, module in program.named_sub_modules(type_=Search):
            if type(module) is Search:
                module.__class__ = QuickSearch
        self.rm = as_rm if rm is None else rm
        self._forward = self._forward_of(program)
        guard = StandInLM.of("", "replay", partial(_answer_request, ""))
        self._settings = {**internals.QUIET, "adapter": self.proxy, "lm": guard, "rm": self.rm}
        # These modules store a failure count, so each run needs a fresh copy.
        parts = program.named_sub_modules(type_=(dspy.Refine, dspy.BestOfN))
        self._fresh = any(True for _ in parts)
        # A program with both methods may call asyncio.run, which needs a thread without a loop.
        self._thread = ThreadPoolExecutor(1, "leret-replay") if has_aforward else None

    def _names_that_stop(self) -> frozenset[str]:
        """Return what decides when the program stops: agents' predictors, picks with a stop.

        An agent is a module with a dictionary of ``tools``, such as `dspy.ReAct`; its own
        predictors choose the tools.
        """
        names = {name for name, pick in self.picks.items() if pick.stop}
        for _, module in self.program.named_sub_modules():
            if not isinstance(vars(module).get("tools"), dict):
                continue
            for part in vars(module).values():
                if id(part) in self._predictor_names:
                    names.add(self._predictor_names[id(part)])
        return frozenset(names)

    def _stand_in(self) -> None:
        """Replace the LMs with stand-ins.

        Predictors that share an LM share a stand-in, as DSPy expects.
        """
        stand_ins: dict[str, StandInLM] = {}
        for name, predictor in self.predictors.items():
            lm = predictor.lm
            key = ""
            if lm is not None:
                key = repr((lm.model, lm.kwargs, id(getattr(lm, "engine", None))))
            if key not in stand_ins:
                stand_ins[key] = StandInLM.of(name, "replay", partial(_answer_request, name))
            predictor.lm = stand_ins[key]
            if type(predictor) is dspy.Predict and not predictor.config:
                predictor.__class__ = _QuickPredict  # ten times faster than dspy.Predict

    def run(
        self,
        task: Task,
        steps: Sequence[Step],
        results: SearchResults,
        retrieve: Retrieve | None = None,
        check: bool = False,
        in_thread: bool = False,
    ) -> Need:
        """Run from the start with the steps of a path.

        Return the first request that has no answer, or the end.

        ``retrieve`` answers searches that are not in ``results``, and its rankings are added there.
        ``check`` raises ReplayError if a second run differs. ``in_thread`` is True only for calls
        in the replay's worker thread.
        """
        if self._thread is not None and not in_thread:
            again = partial(self.run, task, steps, results, retrieve, check, in_thread=True)
            return self._thread.submit(copy_context().run, again).result()
        has_tasks = in_thread or self.is_async
        names = self._predictor_names
        run = ProgramRun(self, steps, results, retrieve, names, list(steps), has_tasks)
        program = self.program
        forward = self._forward
        if self._fresh:
            program, forward = self._copy_for(run)
        settings = {**self._settings, "caller_modules": [program], "trace": []}
        context = internals.carrying(run, settings)
        inputs: Mapping[str, Any] = task.inputs
        if len(self._inputs) == len(inputs) == 1:  # a single input goes to the only argument
            inputs = dict(zip(self._inputs, inputs.values(), strict=True))
        internals.passes.append(run)
        try:
            with suppress(Stop), _MUTED:
                run.prediction = context.run(forward, **inputs)
        except USER_ERRORS as error:
            run.crash = error
        finally:
            internals.passes.remove(run)
        nests_loops = isinstance(run.crash, RuntimeError) and "running event loop" in str(run.crash)
        if nests_loops and not in_thread:
            self._thread = ThreadPoolExecutor(1, "leret-replay")  # for asyncio.run in forward
            return self.run(task, steps, results, retrieve, check)
        unusual = run.left or run.errors or run.side_threads or len(steps) >= MAX_STEPS
        usual = len(run.needs) == 1 and not unusual
        need = run.needs[0] if usual else run.outcome(task)
        if check and not isinstance(need, NeedsSearch):

            def repeat() -> Need:
                return self.run(task, steps, dict(results), retrieve, in_thread=in_thread)

            self._repeat(need, len(steps), repeat)
        return need

    def _repeat(
        self, need: NeedsCompletion | Finished, n_steps: int, run: Callable[[], Need]
    ) -> None:
        for _ in range(_REPEATS):
            again = run()
            if needs.place(again) != needs.place(need):
                raise ReplayError(
                    f"{type(self.program).__name__} is not deterministic given its completions: after the same "
                    f"{n_steps} completion(s), {needs.difference(need, again)}. leret cannot compare completions at a "
                    f"state that it cannot reproduce; {needs.REPEATABLE}"
                )

    def _copy_for(self, run: ProgramRun) -> tuple[dspy.Module, Callable[..., Any]]:
        program = self.program.deepcopy()
        run.names = {id(predictor): name for name, predictor in program.named_predictors()}
        return program, self._forward_of(program)

    def _forward_of(self, program: dspy.Module) -> Callable[..., Any]:
        if self.is_async:
            return lambda **inputs: asyncio.run(program.acall(**inputs))
        return internals.forward_of(program)

    def name_of(self, signature: Any) -> str:
        if signature is None:
            return "(direct)"
        names = []
        for name, predictor in self.predictors.items():
            if predictor.signature.equals(signature):
                names.append(name)
        if len(names) == 1:
            return names[0]
        return f"({signature.__name__})"


class _QuickPredict(dspy.Predict):
    """A predictor that skips DSPy's bookkeeping when its arguments are exactly its input fields."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = internals.settings_here()
        run: Any = settings.get("_leret_run")
        watched = isinstance(run, ProgramRun) and not args and settings["send_stream"] is None
        name = run.names.get(id(self)) if watched else None
        if name is None:
            return super().__call__(*args, **kwargs)
        replay = run.replay
        if settings["adapter"] is not replay.proxy or replay._fields[name] != kwargs.keys():
            return super().__call__(*args, **kwargs)
        fields = vars(self)  # attribute lookup on DSPy modules is slow
        signature = fields["signature"]
        lm = fields["lm"]
        demos = fields["demos"]
        call = PredictorCall(name, kwargs, True, replay.adapter, lm, {}, signature, demos=demos)
        prediction = internals.prediction_of(run.take(call).outputs, signature)
        settings["trace"].append((self, kwargs, prediction))
        return prediction


@dataclass(eq=False)
class ProgramRun:
    """One run of a program along a path.

    `leret.Search` and search tools read the run from ``dspy.settings``.

    Attributes:
        left: recorded steps that no call has used yet.
        has_tasks: True if several asyncio tasks may make calls.
        home: id of the thread of this run; ``older_threads`` existed before the run.
        side_threads: True if threads of `dspy.Parallel` make calls, in any order.
    """

    replay: Replay
    steps: Sequence[Step]
    results: SearchResults
    retrieve: Retrieve | None
    names: Mapping[int, str]
    left: list[Step]
    has_tasks: bool
    searches: list[SearchCall] = field(default_factory=list)
    needs: list[NeedsCompletion | NeedsSearch] = field(default_factory=list)
    prediction: Any = None
    crash: BaseException | None = None
    stopped: set[int | None] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)
    home: int = field(default_factory=threading.get_ident)
    older_threads: list[threading.Thread] = field(default_factory=threading.enumerate)
    side_threads: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------------ requests from the program

    def answer(
        self, adapter: Any, lm: Any, config: Any, signature: Any, demos: Any, inputs: Any
    ) -> list[dict[str, Any]]:
        """Return an adapter call's recorded outputs.

        LMs without a stand-in are called through `recorded_lm`.
        """
        replay = self.replay
        if not isinstance(lm, StandInLM):
            if adapter is replay.adapter:
                adapter = replay.whole_adapter
            answer = adapter(recorded_lm(lm), config, signature, demos, inputs)
            return cast(list[dict[str, Any]], answer)
        predictor = internals.calling_predictor()
        name = self.names.get(id(predictor)) or replay.name_of(signature)
        unchanged = predictor is not None and signature is predictor.signature
        usual = unchanged and not config and demos == predictor.demos
        if adapter is not replay.adapter or name.startswith("("):
            usual = False
        wording = "" if unchanged else signature.instructions
        if name in replay.predictors and lm.owner != replay.predictors[name].lm.owner:
            usual = False
            wording += f" asked of the LM of {lm.owner or 'dspy.settings'}"
        n = config.get("n") or getattr(lm, "kwargs", {}).get("n") or 1
        if n > 1:
            fault = f"{name} requests n > 1 completions in one call; make several calls with n=1"
            self.stop(ProgramError(fault))
        if dspy.settings.send_stream is not None:
            fault = f"{name} streams its completion; call the program without dspy.streamify"
            self.stop(ProgramError(fault))
        call = PredictorCall(name, inputs, usual, adapter, lm, config, signature, wording, demos)
        outputs = cast(list[dict[str, Any]], self.take(call).outputs)
        return copy.deepcopy(outputs)  # the program may change them

    def take(self, call: PredictorCall) -> Step:
        """Return the recorded step for a call; stop the program if there is none."""
        if self.stopped:
            self._raise_if_stopped()
        with self.lock:
            for i, step in enumerate(self.left):
                before = step.call
                same = before.predictor == call.predictor and before.inputs == call.inputs
                if (before.usual and call.usual and same) or before.asks_as(call):
                    del self.left[i]
                    break
            else:
                searches = self._ordered() if self.side_threads else tuple(self.searches)
                self.stop(NeedsCompletion(call, searches))
        if isinstance(step.outputs, AdapterParseError):
            raise step.outputs.with_traceback(None)
        return step

    def answer_direct(self, request: lm15.Request, owner: str) -> lm15.Response:
        """Return the recorded text for a call of ``owner``'s LM that bypassed the adapter."""
        predictor = internals.calling_predictor()
        name = self.names.get(id(predictor))
        if name is None:
            name = self.replay.name_of(getattr(predictor, "signature", None))
        inputs = {"messages": list(internals.messages_of(request))}
        call = PredictorCall(name, inputs, request=request)
        call.lm = StandInLM.of(
            owner, "direct", lambda request: internals.text_response(request, "")
        )
        step = self.take(call)
        return internals.text_response(request, step.text or "", read=self.replay.read)

    def search(self, query: str, k: int, retriever: Retriever | None = None) -> Ranking:
        if self.stopped:
            self._raise_if_stopped()
        if self.retrieve is not None:
            retriever = None
        key = (query, k) if retriever is None else (query, k, id(retriever))
        ranking: Ranking | None = self.results.get(key)
        if ranking is None:
            try:
                if self.retrieve is not None:
                    ranking = self.retrieve(query, k)
            except Exception as error:
                self.stop(error)
            if ranking is None:
                self.stop(NeedsSearch(key, query, k, retriever))
            self.results[key] = ranking
        return ranking

    def call_tool(self, name: str, arguments: Any, ask: Callable[[], Any]) -> Any:
        self._raise_if_stopped()
        key = needs.tool_key(name, arguments)
        if key not in self.results:
            self.stop(NeedsSearch(key, ask=ask))
        return copy.deepcopy(self.results[key])

    def candidates(self, name: str, source: Iterable[Any]) -> Candidates:
        """Return a pick's candidates, cached per path while the program passes the same ones."""
        items = tuple(source)
        before, candidates = self.results.get(("candidates", name), (None, None))
        if before != items:
            candidates = candidates_of(items)
            self.results["candidates", name] = items, candidates
        return cast(Candidates, candidates)

    def choose(self, pick: Pick, call: ChoiceCall) -> Candidate:
        [output] = cast(list[dict[str, Any]], self.take(call).outputs)
        return call.chosen(output["id"])

    def add(self, queries: tuple[str, ...], added: tuple[Ranking, ...]) -> None:
        self.side_threads |= threading.get_ident() != self.home
        self.searches.append(SearchCall(len(self.steps) - len(self.left), queries, added))

    # ------------------------------------------------------------------ results of the run

    def _ordered(self) -> tuple[SearchCall, ...]:
        """Return the searches of threads, which come in any order, sorted by query."""
        searches = []
        ordered = sorted(self.searches, key=lambda search: search.queries)
        for n, search in enumerate(ordered, start=1):
            searches.append(search._replace(n_steps=min(n, len(self.steps))))
        return tuple(searches)

    def outcome(self, task: Task) -> Need:
        if self.side_threads:
            self._wait_for_threads()
        if self.errors:
            raise self.errors[0]
        missing = self.left
        program = type(self.replay.program).__name__
        if self.needs and not (missing and isinstance(self.needs[0], NeedsCompletion)):
            need = self.needs[0] if len(self.needs) == 1 else min(self.needs, key=needs.order)
            if isinstance(need, NeedsSearch):
                return need
            if len(self.steps) >= MAX_STEPS:
                raise ProgramError(
                    f"task {task.id}: the program makes over {MAX_STEPS} LM calls; limit its loops"
                )
            if self.side_threads:
                return NeedsCompletion(need.call, self._ordered())
            return need
        searches = self._ordered() if self.side_threads else tuple(self.searches)
        if self.crash is None:
            if missing:
                difference = needs.asked_instead(missing[0], self.needs)
                raise ReplayError(
                    f"{program} is not deterministic given its completions: {difference}; "
                    f"{needs.REPEATABLE}"
                )
            return Finished(self.prediction, searches)
        is_parse_error = isinstance(self.crash, AdapterParseError)
        if is_parse_error and self.steps and self.steps[-1].outputs is self.crash:
            return Finished(self.crash, searches)
        raise ProgramError(
            f"{program} failed on {task.text!r} after {len(self.steps) - len(missing)} completions: "
            f"{raised(self.crash)}"
        ) from self.crash

    def stop(self, why: NeedsCompletion | NeedsSearch | Exception) -> NoReturn:
        if isinstance(why, Exception):
            self.errors.append(why)
        else:
            self.needs.append(why)
        if threading.get_ident() == self.home:
            self.stopped.add(self._task() if self.has_tasks else None)
        else:
            self.side_threads = True
        raise Stop

    def refuse_own_thread(self) -> None:
        thread = threading.current_thread()
        if thread in _program_threads or thread not in self.older_threads:
            _program_threads.add(thread)
            error = ProgramError(
                f"{type(self.replay.program).__name__} searches or calls an LM in its own thread, which does not have "
                "DSPy's context, so leret cannot answer; use dspy.Parallel, or start the thread with "
                "contextvars.copy_context().run"
            )
            self.errors.append(error)
            raise error

    def _raise_if_stopped(self) -> None:
        """Stop the program again at its next call if a bare ``except`` caught the first stop."""
        task = self._task() if self.has_tasks else None
        if threading.get_ident() == self.home and task in self.stopped:
            raise Stop

    def _task(self) -> int | None:
        """Return the id of the current asyncio task; None outside tasks."""
        try:
            return id(asyncio.current_task())
        except RuntimeError:
            return None

    def _wait_for_threads(self) -> None:
        before: tuple[int, int] | None = None
        deadline = time.monotonic() + _LONGEST_S
        while True:
            thread = self._first_started_thread()
            if thread is None:
                time.sleep(_SETTLE_S)
            else:
                thread.join(_STARVED_S)
                if not thread.is_alive():
                    continue
            now = (len(self.needs), len(self.left))
            is_late = not self.left or time.monotonic() >= deadline
            if now == before and is_late:
                return
            before = now

    def _first_started_thread(self) -> threading.Thread | None:
        for thread in threading.enumerate():
            if thread not in self.older_threads and thread.ident is not None:
                return thread
        return None


def _answer_request(owner: str, request: lm15.Request) -> lm15.Response:
    return cast(lm15.Response, internals.watching_run().answer_direct(request, owner))
