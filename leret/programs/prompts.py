"""Prompts, and the formatter that writes LM messages and parses completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import dspy
from jsonschema import Draft202012Validator
from pydantic_core import to_jsonable_python

from leret.core import dspy_internals as internals
from leret.core.dspy_internals import AdapterParseError, EngineLM, PlainJSONAdapter, lm15
from leret.core.errors import ConfigError, ProgramError, RunError
from leret.core.types import Passage, Task, digest
from leret.policies.base import Messages
from leret.policies.tool_calls import ToolReader, read_calls
from leret.programs.adapters import CompactAdapter
from leret.programs.needs import PLAIN, NeedsCompletion, PredictorCall, Step
from leret.programs.pick import Candidates, ChoiceCall
from leret.programs.prefill import (
    AnswerAdapter,
    PrefilledChatAdapter,
    PrefilledJSONAdapter,
    PrefilledXMLAdapter,
    prefill_messages,
)
from leret.programs.replay import Replay, Stop

_QUICK = (
    dspy.ChatAdapter,
    dspy.JSONAdapter,
    dspy.XMLAdapter,
    PlainJSONAdapter,
    CompactAdapter,
    PrefilledChatAdapter,
    PrefilledJSONAdapter,
    PrefilledXMLAdapter,
)
"""Adapters with a system message and demos that do not depend on the inputs."""


@dataclass(frozen=True)
class Prompt:
    """Demos by predictor, and instructions by predictor where they differ from the program's.

    ``name`` is "0" for the zero-shot prompt. ``score`` is the mean reward on the prompt bank's dev
    questions. ``hint`` names the hint that sampling adds (`leret.rollouts.hints`).
    """

    name: str
    demos: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    instructions: Mapping[str, str] = field(default_factory=dict)
    score: float | None = None
    hint: str | None = None

    @cached_property
    def digest(self) -> str:
        parts = [to_jsonable_python(self.demos), dict(self.instructions)]
        if self.hint is not None:
            parts.append(self.hint)
        return digest(*parts)

    def check_predictors(self, predictors: Iterable[str], key: str) -> None:
        """Raise ConfigError at ``key`` if the prompt names a predictor that the program lacks."""
        unknown = {*self.demos, *self.instructions}.difference(predictors)
        if unknown:
            raise ConfigError(
                f"{key}: unknown predictor {min(unknown)!r}; in the program: {', '.join(predictors)}"
            )

    def save(self, path: Path) -> None:
        value = {
            "name": self.name,
            "score": self.score,
            "demos": to_jsonable_python(self.demos, fallback=str),
            "instructions": dict(self.instructions),
        }
        if self.hint is not None:
            value["hint"] = self.hint
        text = json.dumps(value, ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Prompt:
        """Read a file written by ``save``, DSPy's state file or a saved program.

        Raises:
            RunError: it is none of these.
        """
        try:
            file = path / "program.json" if path.is_dir() else path
            value = json.loads(file.read_text(encoding="utf-8"))
            if "demos" not in value:
                value = {"name": path.stem, **_prompt_of(value)}
            if not all(isinstance(demos, list) for demos in value["demos"].values()):
                raise TypeError("the demos of each predictor must be a list")
            return cls(
                str(value["name"]),
                value["demos"],
                value.get("instructions", {}),
                value.get("score"),
                value.get("hint"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} is not a prompt file ({type(error).__name__}: {error}); the format is "
                '{"name": NAME, "demos": {PREDICTOR: [{FIELD: VALUE, ...}, ...]}}, or what program.save writes'
            ) from error


def _prompt_of(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return demos and instructions by predictor from the JSON of DSPy's or leret's save."""
    states = {}
    for name, predictor in value.get("predictors", {}).items():
        states[name.removeprefix("self.")] = predictor["state"]
    if not states:
        states = {name: state for name, state in value.items() if name != "metadata"}
    demos = {}
    instructions = {}
    for name, state in states.items():
        if state.get("signature"):  # a pick has none
            demos[name] = state["demos"]
            instructions[name] = state["signature"]["instructions"]
    return {"demos": demos, "instructions": instructions}


ZERO_SHOT = Prompt("0")


class Formatter:
    """Formats requests as messages and parses completions, exactly as the program's adapter does.

    Usual calls of the adapters in `_QUICK` take a fast path: instructions and demos are formatted
    once per prompt, and the adapter's ``parse`` reads completions.
    """

    def __init__(self, replay: Replay) -> None:
        self.adapter = replay.adapter
        self._predictors = replay.predictors
        self._read = replay.read
        self.picks = replay.picks
        self._quick = set()
        for name, predictor in self._predictors.items():
            if type(self.adapter) in _QUICK and not _has_dspy_type(predictor.signature):
                self._quick.add(name)
        self._heads: dict[tuple[str, str], Messages] = {}  # messages before the inputs
        self._signatures: dict[tuple[str, str], type[dspy.Signature]] = {}

    def signature(self, predictor: str, prompt: Prompt = ZERO_SHOT) -> type[dspy.Signature]:
        return self._instructed(self._predictors[predictor].signature, predictor, prompt)

    def need(self, predictor: str, inputs: Mapping[str, Any]) -> NeedsCompletion:
        if predictor in self.picks:
            return NeedsCompletion(ChoiceCall(predictor, inputs, candidates=Candidates(())), ())
        module = self._predictors[predictor]
        call = PredictorCall(
            predictor, inputs, True, self.adapter, signature=module.signature, demos=module.demos
        )
        return NeedsCompletion(call, ())

    def messages(
        self, need: NeedsCompletion, prompt: Prompt = ZERO_SHOT, alike: Messages = ()
    ) -> Messages:
        """Return the messages for the LM.

        ``alike``, the same call's messages with another prompt, saves time.
        """
        if isinstance(need.call, ChoiceCall):
            return need.call.messages
        # histories and images span several messages
        is_plain = all(map(_is_plain, need.inputs.values()))
        if not (need.call.usual and need.predictor in self._quick and is_plain):
            return self._in_full(need, prompt)
        signature = self.signature(need.predictor, prompt)
        prefill = prefill_messages(self.adapter, signature)
        if alike:
            message = dict(alike[-1 - len(prefill)])
        else:
            message = internals.last_message(self.adapter, signature, need.inputs)
        if not message["content"] or internals.PART_MARKER in message["content"]:
            return self._in_full(need, prompt)
        end = (message, *prefill)
        key = (need.predictor, prompt.digest)
        if key not in self._heads:
            self._heads[key] = self._in_full(need, prompt)[: -len(end)]
        return (*self._heads[key], *end)

    def step(self, need: NeedsCompletion, completion: str) -> Step:
        """Return the step for a completion.

        ``outputs`` is the adapter's error if the completion does not parse.
        """
        call = need.call
        outputs: list[dict[str, Any]] | AdapterParseError
        try:
            if isinstance(call, ChoiceCall):
                outputs = [{"id": call.chosen(completion).id}]
            elif call.usual and call.predictor in self._quick and completion:
                outputs = [self.adapter.parse(call.signature, completion)]
            else:
                outputs = outputs_of(call, completion, self._read)
        except AdapterParseError as error:
            outputs = error
        return Step(call, outputs, completion)

    def completion(self, predictor: str, outputs: Mapping[str, Any]) -> str:
        signature = self._predictors[predictor].signature
        if isinstance(self.adapter, AnswerAdapter):
            return self.adapter.after_beginning(signature, dict(outputs))
        return str(self.adapter.format_assistant_message_content(signature, dict(outputs)))

    def _instructed(
        self, signature: type[dspy.Signature], name: str, prompt: Prompt
    ) -> type[dspy.Signature]:
        text = prompt.instructions.get(name)
        if text is None:
            return signature
        if signature is not self._predictors[name].signature:
            return cast(type[dspy.Signature], signature.with_instructions(text))
        key = (name, prompt.digest)  # creating a signature is 1000 times slower than this lookup
        if key not in self._signatures:
            self._signatures[key] = signature.with_instructions(text)
        return self._signatures[key]

    def _in_full(self, need: NeedsCompletion, prompt: Prompt) -> Messages:
        call = need.call
        name = need.predictor
        if call.request is not None:
            return internals.messages_of(call.request)
        demos = [dict(demo) for demo in prompt.demos.get(name, call.demos)]
        signature = self._instructed(call.signature, name, prompt)
        request = request_of(call, signature, demos)
        if request.config.response_format:
            raise ProgramError(
                f"{name} calls its LM with a response format, which leret policies do not support; "
                "use another adapter"
            )
        return internals.messages_of(request)


def _has_dspy_type(signature: type[dspy.Signature]) -> bool:
    """Return whether an output is a `dspy.Type`, which adapters do not read with ``parse`` alone."""
    for output in signature.output_fields.values():
        if isinstance(output.annotation, type) and issubclass(output.annotation, dspy.Type):
            return True
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN)


def request_of(
    call: PredictorCall, signature: type[dspy.Signature], demos: Sequence[Mapping[str, Any]]
) -> lm15.Request:
    """Return the request that the call's adapter would send to the LM."""
    assert call.adapter is not None
    seen: list[lm15.Request] = []

    def take(request: lm15.Request) -> lm15.Response:
        seen.append(request)
        raise Stop

    lm = EngineLM("request", take)
    with suppress(Stop):
        call.adapter(lm, dict(call.config), signature, demos, dict(call.inputs))
    if not seen:
        raise ProgramError(
            f"{type(call.adapter).__name__} sends no request for {call.predictor}; "
            "use another adapter"
        )
    return seen[0]


def outputs_of(
    call: PredictorCall, completion: str, read: ToolReader = read_calls
) -> list[dict[str, Any]]:
    """Return the outputs that the call's adapter parses from a completion, or raise its error.

    ``read`` parses native tool calls.
    """
    if call.adapter is None:
        return []
    faults: list[str] = []

    def answer(request: lm15.Request) -> lm15.Response:
        response = internals.text_response(request, completion, read=read)
        faults.extend(_missing_call(request, response, call.signature))
        return response

    lm = EngineLM("response", answer)
    outputs: list[dict[str, Any]] = call.adapter(
        lm, dict(call.config), call.signature, list(call.demos), dict(call.inputs)
    )
    if faults:
        adapter = type(call.adapter).__name__
        raise AdapterParseError(adapter, call.signature, completion, faults[0])
    return outputs


def _missing_call(
    request: lm15.Request, response: lm15.Response, signature: type[dspy.Signature]
) -> Iterator[str]:
    """Yield the faults of a required tool call (by ``tool_choice``, or the only output)."""
    choice = request.config.tool_choice
    schemas = {tool.name: tool.parameters for tool in request.tools}
    forced = choice is not None and choice.mode == "required"
    if not request.tools or not (forced or len(signature.output_fields) == 1):
        return
    names = tuple(schemas)
    if choice is not None and choice.allowed:
        names = choice.allowed
    if not any(call.name in names for call in response.tool_calls):
        yield f"the completion has no valid call of {' or '.join(names)}"
    if not forced:
        return
    for call in response.tool_calls:
        validator = Draft202012Validator(schemas.get(call.name, {}))
        for error in validator.iter_errors(call.input):
            yield f"the arguments of {call.name} are invalid: {error.message}"


def reader_lines(
    task: Task, passages: Iterable[Passage], words: int, chat: bool, instruction: str | None = None
) -> tuple[str, ...]:
    """Return a reader's prompt: the start of each passage, the inputs, and the instruction."""
    lines = []
    for passage in passages:
        text = f"{passage.title}: {passage.text}".removeprefix(": ")
        lines.append(" ".join(text.split()[:words]))
    inputs = task.inputs if isinstance(task.inputs, dict) else {"question": task.text}
    lines.append("\n".join(f"{name}: {value}" for name, value in inputs.items()))
    if not instruction:
        instruction = "Answer in a few words." if chat else "answer:"
    return (*lines, instruction)
