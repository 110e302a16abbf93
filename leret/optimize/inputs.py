"""Convert the inputs of a DSPy optimizer for leret's stages: examples to tasks, LMs to policies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import dspy
from dspy.teleprompt.bootstrap_finetune import prepare_teacher
from dspy.utils.callback import BaseCallback
from pydantic_core import to_jsonable_python

from leret.core.aio import submit
from leret.core.dspy_internals import CLIENT_KEYS, complete_messages
from leret.core.errors import DataError, LeretError, PolicyError, ProgramError, reason
from leret.core.types import Outcome, Task, digest
from leret.optimize.provider import LM, Provider
from leret.policies.base import Completion, Policy, Request
from leret.policies.checkpoints import find_model
from leret.policies.dspy_lm import PolicyEngine, policy_of
from leret.policies.remote.openai import OpenAIPolicy
from leret.programs.pick import named_picks
from leret.programs.prompts import Prompt
from leret.rewards import Reward, scoring

RewardFunction = Callable[[dspy.Example, Outcome], "float | bool | None"]
"""A user's reward function, called with an example and the outcome of a step."""

# example fields that can name the relevant documents; the first non-empty field is used
_IDS = ("gold", "gold_ids", "relevant_doc_ids")
_TITLES = ("gold_titles",)

_SERVED = ("openai/", "hosted_vllm/", "lm_studio/")
"""Prefixes of the models of ``dspy.LM`` on servers with OpenAI's API."""


class LMCallsSpent(LeretError):
    """The limit ``max_lm_calls`` is reached."""


class CallBudget:
    """Thread-safe counter of LM calls with a maximum.

    ``reserved`` of these calls cannot be spent yet.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.reserved = 0
        self.spent = 0
        self._lock = threading.Lock()

    def spend(self, n: int = 1) -> None:
        """Count ``n`` calls before they start.

        Raise LMCallsSpent if they would exceed the maximum.
        """
        with self._lock:
            if self.bound is not None and self.spent + n > self.bound - self.reserved:
                reserve = ""
                if self.reserved:
                    reserve = f" ({self.reserved} more are reserved for valset)"
                raise LMCallsSpent(
                    f"max_lm_calls={self.bound} is reached after {self.spent} LM calls{reserve}; "
                    "raise the limit and compile again with the same run_dir to reuse the samples "
                    "and trained policies"
                )
            self.spent += n


@dataclass(frozen=True)
class CountedPolicy:
    """A policy that gets its completions from ``ask`` and counts them."""

    name: str
    digest: str
    budget: CallBudget
    ask: Callable[[Request], Awaitable[list[Completion]]]

    async def complete(self, request: Request) -> list[Completion]:
        self.budget.spend(len(request.seeds))
        return await self.ask(request)

    async def aclose(self) -> None:
        """Do nothing, because the owner closes the policy."""


def is_trainable(lm: Any) -> bool:
    """Return True if leret has the LM's weights."""
    provider = getattr(lm, "provider", None)
    return isinstance(provider, Provider) and provider.finetunable


def counted_policy(lm: dspy.BaseLM, budget: CallBudget) -> CountedPolicy:
    """Return a call-counting policy: a leret LM's policy, or a policy that calls the LM."""
    if is_trainable(lm):
        policy = policy_of(lm)
        complete: Callable[[Request], Awaitable[list[Completion]]] = policy.complete
        if isinstance(policy, OpenAIPolicy):
            complete = _in_background(policy)
        return CountedPolicy(policy.name, policy.digest, budget, complete)

    async def ask(request: Request) -> list[Completion]:
        if request.messages[0].get("tools"):
            raise PolicyError(
                f"{lm.model} cannot make native tool calls; use leret.LM, or an adapter without "
                "them"
            )
        try:
            texts = [await complete_messages(lm, request.messages) for _ in request.seeds]
        except Exception as error:
            raise PolicyError(f"{lm.model}: {reason(error)}") from error
        return [Completion(text, "stop", 0, 0) for text in texts]

    settings = {name: str(value) for name, value in lm.kwargs.items() if "key" not in name}
    return CountedPolicy(lm.model, digest("lm", lm.model, settings), budget, ask)


def _in_background(policy: OpenAIPolicy) -> Callable[[Request], Awaitable[list[Completion]]]:
    """Return ``policy.complete`` on leret's event loop.

    It keeps connections open between short event loops.
    """

    async def complete(request: Request) -> list[Completion]:
        return await asyncio.wrap_future(submit(policy.complete(request)))

    return complete


def counted_lm(lm: dspy.BaseLM, budget: CallBudget, **changes: Any) -> dspy.BaseLM:
    """Return a call-counting copy of an LM with ``changes`` applied."""
    kind: Any = type(lm)

    class Counted(kind):
        is_counted = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            budget.spend()
            return super().__call__(*args, **kwargs)

        async def acall(self, *args: Any, **kwargs: Any) -> Any:
            budget.spend()
            return await super().acall(*args, **kwargs)

    copied: dspy.BaseLM = lm.copy(**changes)
    copied.__class__ = Counted
    return copied


class OtherCalls(BaseCallback):
    """Counts calls to LMs other than a `counted_lm`, even above the maximum.

    The next `counted_lm` call then raises.
    """

    def __init__(self, budget: CallBudget) -> None:
        self.budget = budget

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if not hasattr(instance, "is_counted"):
            self.budget.spent += 1


def greedy_lm(lm: dspy.BaseLM, budget: CallBudget) -> dspy.BaseLM:
    """Return a call-counting copy of an LM.

    Its temperature is 0 if leret has its weights.
    """
    if not is_trainable(lm):
        return counted_lm(lm, budget)
    return counted_lm(lm, budget, temperature=0.0)


def read_tasks(
    trainset: Iterable[dspy.Example], reward: str | RewardFunction | None
) -> dict[Task, dspy.Example]:
    """Convert examples to tasks, sorted by task id; identical examples become one task.

    Raises:
        DataError: there are no examples, two differ only in their labels, or a label that
            ``reward`` needs is missing.
    """
    examples: dict[str, tuple[Task, dspy.Example]] = {}
    for number, example in enumerate(trainset):
        if not isinstance(example, dspy.Example):
            raise DataError(
                f"trainset[{number}] is a {type(example).__name__}; use "
                "dspy.Example(...).with_inputs('question')"
            )
        _, gold = _gold_of(example)
        if isinstance(reward, str) and not gold:
            fields = ", ".join(example.keys())
            raise DataError(
                f"trainset[{number}] names no relevant documents for reward={reward!r} (fields: "
                f"{fields}); add a field {', '.join(_IDS)} (ids) or {', '.join(_TITLES)}, or pass "
                "a function reward(example, outcome)"
            )
        task = Task(inputs_id(example), dict(example.inputs()), gold)
        _, first = examples.setdefault(task.id, (task, example))
        if first != example:
            raise DataError(
                f"trainset[{number}] and another example differ only in their labels; remove one"
            )
    if not examples:
        raise DataError("trainset is empty; pass at least one example")
    return dict(examples[name] for name in sorted(examples))


def inputs_id(example: dspy.Example) -> str:
    """Return a digest of an example's inputs."""
    return digest(to_jsonable_python(dict(example.inputs()), fallback=repr))


def refuse_recurring(tasks: Iterable[Task], valset: Iterable[dspy.Example]) -> None:
    """Raise DataError if a valset example has the same inputs as a trainset example."""
    ids = {task.id for task in tasks}
    both = [example for example in valset if inputs_id(example) in ids]
    if both:
        shown = {name: str(value)[:80] for name, value in both[0].inputs().items()}
        raise DataError(
            f"{len(both)} valset examples are also in trainset, such as {shown}; remove them from "
            "valset"
        )


def step_reward(
    reward: str | RewardFunction | None, examples: Mapping[Task, dspy.Example]
) -> str | Reward:
    """Return the step reward for the sampler; if ``reward`` is None, no step is scored."""
    if reward is None:
        return lambda outcome: None
    if callable(reward):

        def by_user(outcome: Outcome) -> float | None:
            value = reward(examples[outcome.task], outcome)
            if value is None:
                return None
            return float(value)

        return by_user
    if not any(_gold_of(example)[0] in _TITLES for example in examples.values()):
        return reward
    measure = scoring(reward)

    def by_title(outcome: Outcome) -> float | None:
        passages = [
            passage._replace(doc_id=passage.title or passage.doc_id) for passage in outcome.ranking
        ]
        return measure(replace(outcome, ranking=tuple(passages)))

    return by_title


def _gold_of(example: dspy.Example) -> tuple[str, tuple[str, ...]]:
    for field in (*_IDS, *_TITLES):
        value = example.get(field)
        if not value:
            continue
        if isinstance(value, str):
            value = [value]
        elif isinstance(value, set):
            value = sorted(value)
        return field, tuple(dict.fromkeys(map(str, value)))
    return "", ()


def trained_lms(program: dspy.Module) -> dict[str, dspy.LM]:
    """Map predictors to the leret LMs to train.

    LeretError if there is none, or if one of them cannot be trained.
    """
    lms = {
        name: predictor.lm
        for name, predictor in program.named_predictors()
        if is_trainable(predictor.lm)
    }
    if not program.predictors():
        raise ProgramError(
            f"{type(program).__name__} has no predictor to train: named_predictors() is empty; "
            "store each dspy.Predict on the program, as an attribute or in a list or dict"
        )
    if not lms:
        untrained = {str(predictor.lm.model): predictor.lm for predictor in program.predictors()}
        names = ", ".join(sorted(untrained))
        raise PolicyError(
            f"none of the student's LMs can be trained ({names}), because their weights are "
            f"unknown; use {_with_weights_of(*untrained.values())}, or set finetuning_model of the "
            "dspy.LM"
        )
    for lm in set(lms.values()):
        try:
            find_model((lm.finetuning_model or lm.model).removeprefix("leret/"))
        except LeretError as error:
            raise PolicyError(
                f"{lm.model} has no local weights to train ({error}); use {_with_weights_of(lm)}, "
                "or give the predictors that use it a different LM"
            ) from error
    return lms


def _with_weights_of(*lms: dspy.BaseLM) -> str:
    """Return the code for an LM with weights, on the server of one of the LMs if there is one."""
    for lm in lms:
        url = server_of(lm)
        if url is not None:
            name = str(lm.model).removeprefix("leret/").removeprefix("openai/")
            return f"leret.LM({name!r}, api_base={url!r}, weights=DIRECTORY_OR_HUB_NAME)"
    return "leret.LM(DIRECTORY_OR_HUB_NAME)"


def server_of(lm: dspy.BaseLM) -> str | None:
    """Return the URL of the server that answers an LM's requests; None if it is not known."""
    engine = getattr(lm, "engine", None)
    if isinstance(engine, PolicyEngine):
        urls = getattr(engine.settings_of(lm.model), "urls", None)
        return urls[0] if urls else None
    kwargs = getattr(lm, "kwargs", {})
    url = kwargs.get("api_base") or kwargs.get("base_url")
    if url is None:
        return None
    return str(url)


def with_weights(program: dspy.Module) -> dict[dspy.BaseLM, dspy.BaseLM]:
    """Replace each ``dspy.LM`` on a server with known weights by a `LM`.

    The weights are its ``finetuning_model``. The `LM` has the same server and weights.

    Return the original LMs by the LMs that replace them. Other LMs stay: leret does not train them.
    """
    replaced: dict[dspy.BaseLM, LM] = {}
    for predictor in program.predictors():
        lm = predictor.lm
        if type(lm) is not dspy.LM or not lm.finetuning_model:
            continue
        if lm.model.startswith(_SERVED) and server_of(lm):
            if lm not in replaced:
                replaced[lm] = _trainable(lm)
            predictor.lm = replaced[lm]
    return {new: old for old, new in replaced.items()}


def _trainable(lm: dspy.LM) -> LM:
    keys = {"api_key", "timeout", *lm.kwargs} - (CLIENT_KEYS - {"api_key", "timeout"})
    arguments = {key: lm.kwargs.get(key) for key in keys}
    name = lm.model.partition("/")[2]
    return LM(name, api_base=server_of(lm), weights=lm.finetuning_model, **arguments)


def pick_actors(program: dspy.Module) -> dict[str, Policy]:
    """Return the actors of a program's picks, by pick name; LeReT does not train actors."""
    actors: dict[str, Policy] = {}
    for name, pick in named_picks(program).items():
        if pick.actor is None:
            raise ProgramError(
                f"the Pick {name} has no actor, and LeReT trains only LMs: set pick.actor = "
                "POLICY, for example to a picker trained by `leret train`"
            )
        actors[name] = pick.actor
    return actors


def teacher_prompt(number: int, student: dspy.Module, teacher: dspy.Module) -> Prompt:
    """Return a prompt with a teacher's demos and instructions."""
    demos: dict[str, list[dict[str, Any]]] = {}
    instructions: dict[str, str] = {}
    for name, predictor in prepare_teacher(student, teacher).named_predictors():
        demos[name] = [dict(demo) for demo in predictor.demos]
        instructions[name] = predictor.signature.instructions
    return Prompt(str(number), demos, instructions)
