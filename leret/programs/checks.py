"""Check, on the first sampled paths, that leret sends the same messages as the program with the user's adapter."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback

from leret.core import dspy_internals as internals
from leret.core.dspy_internals import QUIET, StandInLM, lm15, messages_of, text_response
from leret.core.errors import ProgramError, ReplayError, raised
from leret.core.types import Candidate, Ranking, Task, json_encoder
from leret.policies.base import Messages
from leret.policies.local.chat_template import n_common
from leret.programs.load import bound_inputs, input_names
from leret.programs.needs import REPEATABLE, NeedsCompletion, Step, tool_key
from leret.programs.pick import Candidates, ChoiceCall, Pick, candidates_of, named_picks
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.replay import SearchResults, Stop
from leret.programs.runner import ProgramRunner
from leret.programs.search import record_lms, recorded_lm
from leret.retrieval.base import Retriever

_encode = json_encoder(sort_keys=True, ensure_ascii=False)


async def check_path(
    program: dspy.Module,
    runner: ProgramRunner,
    task: Task,
    steps: Sequence[Step],
    results: SearchResults,
    prompts: Sequence[Prompt] = (ZERO_SHOT,),
) -> None:
    """Raise ReplayError if ``program``, a separate instance, sends other messages than leret."""
    needs = [await runner.advance(task, steps[:n], results) for n in range(len(steps))]
    # The callback gets its own run: callbacks change tracebacks, and ReAct shows those to its LM.
    watch = _ForeignLMs()
    runs: list[tuple[Prompt, list[BaseCallback]]] = [(ZERO_SHOT, [watch])]
    runs += [(prompt, []) for prompt in prompts]
    for prompt, callbacks in runs:
        ours = []
        for need, step in zip(needs, steps, strict=True):
            if isinstance(need, NeedsCompletion):
                ours.append((runner.formatter.messages(need, prompt), step.text or ""))
        left, theirs, error = await asyncio.to_thread(
            _run_stock, program, runner, task, prompt, ours, dict(results), callbacks
        )
        where = f"{type(program).__name__}, task {task.id}, prompt {prompt.name}"
        if watch.model:
            raise ReplayError(
                f"{where}: the program calls the LM {watch.model}, and leret cannot intercept the call; "
                "store the LM on the program (self.judge = dspy.LM(...)), "
                "or set the adapter outside forward"
            )
        if left and not callbacks:
            difference = message_difference(left[0], theirs)
            if error is not None:
                difference += f"\n  program raises {raised(error)}"
            raise ReplayError(
                f"{where}: leret and the program send different messages:\n{difference}\n"
                f"The program must behave the same in every run: {REPEATABLE}"
            )


def _run_stock(
    program: dspy.Module,
    runner: ProgramRunner,
    task: Task,
    prompt: Prompt,
    path: Sequence[tuple[Messages, str]],
    results: SearchResults,
    callbacks: list[BaseCallback],
) -> tuple[list[Messages], Messages | None, Exception | None]:
    """Run a program in plain DSPy.

    Return the recorded prompts that it does not send, its first other prompt, and its error.
    """
    left = list(path)
    others: list[Messages] = []

    def recorded(messages: Messages) -> str:
        for i, (prompt_messages, text) in enumerate(left):
            if prompt_messages == messages:
                del left[i]
                return text
        others.append(messages)
        raise Stop  # the program makes a call that was not recorded

    def respond(request: lm15.Request) -> lm15.Response:
        text = recorded(messages_of(request))
        return text_response(request, text, read=runner.replay.read)

    lm = StandInLM.of("", "recorder", respond)

    def answer(adapter: Any, caller: Any, *call: Any) -> Any:
        if isinstance(caller, StandInLM):
            return adapter(lm, *call)
        return runner.replay.whole_adapter(recorded_lm(caller), *call)

    formatter = runner.formatter
    program = program.deepcopy()
    record_lms(program)
    for name, predictor in program.named_predictors():
        predictor.lm = lm
        predictor.signature = formatter.signature(name, prompt)
        if name in prompt.demos:
            predictor.demos = [dict(demo) for demo in prompt.demos[name]]
    named_picks(program)
    retriever = None if runner.searches is None else runner.searches.retriever
    observer = SearchMemory(results, retriever, recorded)
    settings = {
        **QUIET,
        "trace": [],
        "callbacks": callbacks,
        "adapter": internals.AdapterProxy(formatter.adapter, answer),
        "lm": lm,
        "rm": runner.replay.rm,
    }
    failure = None
    try:
        with suppress(Stop), internals.suppress_output("dspy"):
            context = internals.carrying(observer, settings)
            context.run(internals.run_program, program, **bound_inputs(input_names(program), task))
    except Exception as error:
        failure = error
    missing = [messages for messages, _ in left]
    return missing, others[0] if others else None, failure


class _ForeignLMs(BaseCallback):
    model = ""

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if not isinstance(instance, StandInLM):
            self.model = str(getattr(instance, "model", type(instance).__name__))


class SearchMemory:
    """Answers searches outside a replay: from stored results, or by searching once.

    ``choose_by`` answers picks (by default, each pick's actor answers). ``rankings`` lists the
    search results in order.
    """

    def __init__(
        self,
        results: SearchResults,
        retriever: Retriever | None,
        choose_by: Callable[[Messages], str] | None = None,
    ) -> None:
        self._results = results
        self._retriever = retriever
        self._choose_by = choose_by
        self.rankings: list[Ranking] = []

    def search(self, query: str, k: int, retriever: Retriever | None = None) -> Ranking:
        key: tuple[Any, ...] = (query, k)
        if self._retriever is not None:
            retriever = self._retriever
        elif retriever is not None:
            key = (query, k, id(retriever))
        if key not in self._results:
            if retriever is None:
                raise ProgramError(
                    "a leret.Search has no retriever: pass one as Search(retriever=...)"
                )
            self._results[key] = retriever.search([query], k)[0]
        ranking: Ranking = self._results[key]
        return ranking

    def call_tool(self, name: str, arguments: Any, ask: Callable[[], Any]) -> Any:
        key = tool_key(name, arguments)
        if key not in self._results:
            self._results[key] = ask()
        return copy.deepcopy(self._results[key])

    def candidates(self, name: str, source: Iterable[Any]) -> Candidates:
        return candidates_of(source)

    def choose(self, pick: Pick, call: ChoiceCall) -> Candidate:
        if self._choose_by is None:
            return pick.ask(call)
        return call.chosen(self._choose_by(call.messages))

    def add(self, queries: tuple[str, ...], added: tuple[Ranking, ...]) -> None:
        self.rankings.extend(added)


def message_difference(
    ours: Sequence[Mapping[str, str]],
    theirs: Sequence[Mapping[str, str]] | None,
    names: tuple[str, str] = ("leret", "program"),
) -> str:
    """Quote two prompts, as JSON, around their first difference, labelled by ``names``.

    ``theirs`` is None if it was not sent.
    """
    if theirs is None:
        return f"  {names[1]} sends nothing"
    texts = [_encode(list(ours)), _encode(list(theirs))]
    start = n_common(*texts)
    lines = [f"  from character {start}:"]
    for name, text in zip(names, texts, strict=True):
        lines.append(f"  {name}: ...{text[max(0, start - 20) : start + 60]}")
    return "\n".join(lines)
