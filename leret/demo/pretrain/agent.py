"""The policy `agent`: `demo`, trained on to answer every call of a program that searches.

Beside the demo's own rows it is shown a ReAct agent's steps and answers, notes, answers and queries from notes, all as
``CompactAdapter(outputs=True)`` writes them, with the fields and the tools under many names. The demonstrators see the
question and what was found, never a gold document, and when an agent stops is drawn: good and bad paths are for reward
to tell apart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dspy

from leret.core.bundled import policy_directory
from leret.core.types import Passage, Ranking, merge
from leret.demo.pretrain import words
from leret.demo.pretrain.examples import prompt_ids
from leret.demo.pretrain.heuristics import content_words, names
from leret.demo.pretrain.loop import LoopSettings, Report, Row, train
from leret.demo.pretrain.probe import make_gate
from leret.demo.pretrain.scratch import MIXED, STEPS_PER_MINUTE, training_facts
from leret.demo.pretrain.worlds import Scene, StreamSettings, draw, query_rows, rows, scenes, start, write
from leret.policies.checkpoints import load_weights
from leret.programs.adapters import CompactAdapter
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

QUESTIONS, CONTEXTS = ("question", "claim"), ("context", "notes", "passages", "documents")
QUERIES, NOTES = ("query", "search_query"), ("new_notes", "note", "notes", "summary")
TOOLS = (
    *("search", "look_up", "lookup", "retrieve", "find", "search_tool", "search_corpus", "search_index"),
    *("search_documents", "search_docs", "search_passages", "search_wikipedia", "search_wiki", "find_documents"),
    *("find_passages", "get_passages", "get_documents", "wikipedia", "wiki", "bm25"),
)
"""Names that the policy can write: of a signature's fields, and of a tool with the one argument ``query``."""

_THOUGHTS = (
    *("i look for {}", "i need to know more about {}", "let me search for {}", "next is {}", "who or what is {} ?"),
    *("the question is about {}", "first find {}", "is there more on {} ?"),
)
_ENOUGH = ("this is enough to answer", "all of it is found", "i know the answer", "there is no more to look for")
_REASONS = ("the passage on {} says so", "it is said of {}", "{} has the answer", "as i read about {}")
_FIELDS = "reasoning answer titles trajectory outputs next_thought next_tool_name next_tool_args"
_VALUES = "yes no list dict finish completed"
_SAID = {  # what a question asks for, and how a passage says it
    "city": r"(?:born in \d+|based|company) in (\w+)",
    "university": r"(\w+ University)",
    "award": r"won the (\w+ \w+)",
    "instrument": r"played the (\w+)",
    "year": r"\b(\d{4})\b",
}
_STOPS = (0.0, 0.15, 0.5, 0.85)
"""Chance that an agent finishes after so many searches."""

_ADAPTER = CompactAdapter(outputs=True)
_TRAINING = LoopSettings(
    steps=500,
    lr=2e-3,
    decay_from=0.3,
    prompt_weight=0.1,
    checkpoint_every=100,
    probe_every=500,
)
_MIX = replace(MIXED, questions=200, uses=2, demos=(0.1, 0.1), lists=(0.0, 0.0))


def vocabulary() -> list[str]:
    """The words of `demo` in their order, then those that are new."""
    known = words.vocabulary()
    steps = [f"{part}_{i}" for part in ("thought", "tool_name", "tool_args", "observation") for i in range(10)]
    fields = (*QUESTIONS, *CONTEXTS, *QUERIES, *NOTES, *TOOLS, *_FIELDS.split(), *_VALUES.split(), *steps)
    said = [word for text in (*_THOUGHTS, *_ENOUGH, *_REASONS) for word in text.replace("{}", "").split()]
    return [*known, *sorted({*fields, *said, *'{}[]"()|:,.-'} - set(known))]


def agent_rows(tokenizer: PreTrainedTokenizerFast, seed: int, settings: StreamSettings) -> list[Row]:
    """Rows of a new world: the demo's, single calls, and the calls of agents."""
    found = scenes(seed, settings)
    begun, retriever = start(seed, settings)
    made = query_rows(tokenizer, found, settings)
    row = partial(_row, tokenizer)
    for scene in found:
        made += [row(*_query_call(scene.first(), settings.hop1)), row(*_query_call(_noted(scene), settings.hop2))]
        made += [row(*_note_call(scene)), row(*_answer_call(scene))]
        made += [row(*_query_call(scene, settings.hop2))] * (scene.rng.random() < 0.5)
    return [*made, *(row(*call) for call in _agent_calls(begun, retriever, settings))]


_Call = tuple[Any, Mapping[str, Any], list[dict[str, Any]]]
"""A signature, inputs, and outputs that may follow."""


def _row(tokenizer: PreTrainedTokenizerFast, signature: Any, inputs: Any, outputs: Sequence[Mapping[str, Any]]) -> Row:
    texts = [_ADAPTER.format_assistant_message_content(signature, one) for one in outputs]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt = prompt_ids(tokenizer, _ADAPTER.format(signature, (), inputs))
    return Row(prompt, tuple((*one, tokenizer.eos_token_id) for one in ids))


_signature = cache(dspy.Signature)


def _call(rng: random.Random, scene: Scene, fields: Mapping[str, str], outputs: list[dict[str, Any]]) -> _Call:
    """A call on a scene; ``fields`` are the outputs' types. A half reason first."""
    asked, context = rng.choice(QUESTIONS), rng.choice([name for name in CONTEXTS if name not in fields])
    if rng.random() < 0.5:
        outputs = [{name: value for name, value in one.items() if name != "reasoning"} for one in outputs]
    types = ", ".join(f"{name}: {fields.get(name, 'str')}" for name in outputs[0])
    passages = [f"{p.title} | {p.text}" if p.title else p.text for p in scene.found]
    inputs = {asked: scene.question.text, context: passages}
    return _signature(f"{asked}, {context}: list[str] -> {types}"), inputs, outputs


def _query_call(scene: Scene, styles: Mapping[str, float]) -> _Call:
    rng, name = scene.rng, scene.rng.choice(QUERIES)
    queries = [write(draw(rng, styles), scene) for _ in range(6)]
    return _call(rng, scene, {name: "str"}, [{"reasoning": _thought(rng, text), name: text} for text in queries])


def _note_call(scene: Scene) -> _Call:
    rng, name, listed = scene.rng, scene.rng.choice(NOTES), scene.rng.random() < 0.3
    outputs: list[dict[str, Any]] = []
    for _ in range(5):
        passage, text = note(scene)
        reasoning = rng.choice(_REASONS).format(passage.title)
        outputs.append({"reasoning": reasoning, name: [text] if listed else text})
        if listed:
            outputs[-1]["titles"] = [passage.title]
    return _call(rng, scene, {name: "list[str]" if listed else "str", "titles": "list[str]"}, outputs)


def _answer_call(scene: Scene) -> _Call:
    return _call(scene.rng, scene, {"answer": "str"}, [answer(scene) for _ in range(4)])


def _noted(scene: Scene) -> Scene:
    """The scene with notes instead of passages."""
    notes = dict.fromkeys(note(scene)[1] for _ in range(scene.rng.randint(1, 3)))
    return replace(scene, found=tuple(Passage("", "", text, 0.0) for text in notes))


def _thought(rng: random.Random, query: str) -> str:
    return rng.choice(_THOUGHTS).format(" ".join(query.split()[: rng.randint(1, 3)]))


def note(scene: Scene) -> tuple[Passage, str]:
    """A clause of a passage, after its title or alone: half the time that which shares the question's rarest words."""
    asked, rng = set(content_words(scene.question.text.lower())), scene.rng

    def weight(text: str) -> float:
        return sum(scene.idf(word) for word in sorted(asked & set(content_words(text.lower()))))

    near = rng.random() < 0.5
    passage = max(scene.found, key=lambda p: weight(p.text)) if near else rng.choice(scene.found)
    clauses = [part.strip(" .") for part in re.split(r"(?<=\.)\s+|, | and ", passage.text)]
    clauses = [part for part in clauses if len(part.split()) > 2] or [passage.text]
    clause = max(clauses, key=weight) if near and rng.random() < 0.5 else rng.choice(clauses)
    clause = " ".join(clause.split()[:16])
    return passage, clause if rng.random() < 0.5 or passage.title in clause else f"{passage.title} : {clause}"


def answer(scene: Scene) -> dict[str, Any]:
    """Something of the kind that is asked for, often from a passage that another passage names; else a name."""
    rng, question = scene.rng, scene.question.text
    linked = [p for p in scene.found if any(p.title in other.text for other in scene.found if other is not p)]
    passage = rng.choice(linked if linked and rng.random() < 0.6 else scene.found)
    kind = next((kind for kind in _SAID if kind in question and " or " not in question), None)
    said = re.findall(_SAID[kind], passage.text) if kind else []
    text = rng.choice(["yes", "no"] if question.startswith("Is ") else said or names(question) or [passage.title])
    return {"reasoning": rng.choice(_REASONS).format(passage.title), "answer": text}


@dataclass(slots=True, eq=False)
class _Walk:
    """An agent on its way."""

    scene: Scene
    asked: str
    tools: tuple[str, ...]
    k: int
    with_ids: bool  # whether the tool returns rows
    trajectory: dict[str, Any]

    @classmethod
    def begin(cls, scene: Scene) -> _Walk:
        rng = scene.rng
        tools = tuple(rng.sample(TOOLS, rng.choice((1, 1, 1, 2))))
        return cls(scene, rng.choice(QUESTIONS), tools, rng.choice((2, 3)), rng.random() < 0.3, {})

    def call(self, settings: StreamSettings, n: int) -> _Call:
        """The next step: five that may be taken."""
        signature = _agent(self.asked, self.tools)[0]
        return signature, self._inputs(), [self.step(settings, _STOPS[n]) for _ in range(5)]

    def last_call(self) -> _Call:
        """The answer, after the last step."""
        return _agent(self.asked, self.tools)[1], self._inputs(), [answer(self.scene) for _ in range(4)]

    def step(self, settings: StreamSettings, stop: float) -> dict[str, Any]:
        rng, found = self.scene.rng, self.scene.found
        if rng.random() < stop:
            return _taken(rng.choice(_ENOUGH), "finish", {})
        query = write(draw(rng, settings.hop2 if found else settings.hop1), self.scene)
        return _taken(_thought(rng, query), rng.choice(self.tools), {"query": query})

    def take(self, step: Mapping[str, Any], n: int, found: Ranking) -> None:
        """Note a step and what it found."""
        own = [{"doc_id": p.doc_id, "title": p.title, "text": p.text} for p in found]
        seen: Any = own if self.with_ids else [f"{p.title} | {p.text}" for p in found]
        self.trajectory |= {f"{name.removeprefix('next_')}_{n}": value for name, value in step.items()}
        self.trajectory[f"observation_{n}"] = seen if found else "Completed."
        self.scene = replace(self.scene, found=merge([self.scene.found, found]))

    def _inputs(self) -> dict[str, Any]:
        signature = _signature(f"{', '.join(self.trajectory)} -> x")
        shown = _ADAPTER.format_user_message_content(signature, self.trajectory)
        return {self.asked: self.scene.question.text, "trajectory": shown}


def _taken(thought: str, tool: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}


@cache
def _agent(asked: str, tools: tuple[str, ...]) -> tuple[Any, Any]:
    """The signatures of a ReAct agent: of its steps, and of its answer."""

    def look(query: str) -> None: ...

    agent = dspy.ReAct(f"{asked} -> answer", tools=[dspy.Tool(look, name=tool) for tool in tools])
    return agent.react.signature, agent.extract.predict.signature


def _agent_calls(begun: Sequence[Scene], retriever: Retriever, settings: StreamSettings) -> list[_Call]:
    """The calls of an agent a question, until all of them have answered."""
    calls: list[_Call] = []
    walks = [_Walk.begin(scene) for scene in begun]
    for n in range(len(_STOPS)):
        calls += [walk.call(settings, n) for walk in walks]
        steps = [walk.step(settings, 0.0) for walk in walks]
        found = retriever.search([step["next_tool_args"]["query"] for step in steps], 3)
        for walk, step, ranking in zip(walks, steps, found, strict=True):
            walk.take(step, n, ranking[: walk.k])
        ended = [walk for walk in walks if walk.scene.rng.random() < 0.4]
        for walk in ended:
            walk.take(_taken(walk.scene.rng.choice(_ENOUGH), "finish", {}), n + 1, ())
            calls.append(walk.last_call())
        walks = [walk for walk in walks if walk not in ended]
    return [*calls, *(walk.last_call() for walk in walks)]


def pretrain_agent(
    out: Path, *, seed: int = 0, steps: int | None = None, minutes: float | None = None, report: Report | None = None
) -> Path:
    """Train `demo` on to `agent` in ``out``, or go on with it; the arguments are `pretrain_scratch`'s."""
    import torch
    from transformers import AutoModelForCausalLM

    steps = steps or (_TRAINING.steps if minutes is None else max(1, round(minutes * STEPS_PER_MINUTE)))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = words.build_tokenizer(vocabulary())
    tokenizer.save_pretrained(out)
    made = rows(tokenizer, replace(_MIX, seed=seed + 10), agent_rows)
    settings = replace(_TRAINING, steps=steps, seed=seed)
    train(_widened(len(tokenizer), seed), made, settings, out, probe=make_gate(tokenizer), report=report)
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16).save_pretrained(out)
    (out / "README.md").write_text(_card(out, seed, steps), encoding="utf-8")
    return out


def _widened(n_words: int, seed: int) -> Qwen3ForCausalLM:
    """`demo` with fresh rows for new words."""
    import torch

    model, old = words.build_model(n_words, seed), load_weights(policy_directory("demo"), "float32").state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight[: len(old[name])] = old[name]
    return model


def _card(out: Path, seed: int, steps: int) -> str:
    cost, measured = training_facts(out / "pretrain.jsonl")
    return f"""# A tiny policy for programs that search

`demo`, trained on to answer every call of a program, not queries alone: ReAct steps, notes, reasons, answers. It reads
`leret.CompactAdapter(outputs=True)`, and knows the words of leret's generated worlds and these names:

- questions: {", ".join(QUESTIONS)}; lists: {", ".join(CONTEXTS)}
- queries: {", ".join(QUERIES)}; notes: {", ".join(NOTES)}; also reasoning, titles, answer
- tools, with the one argument `query`: {", ".join(TOOLS)}

Made by `leret pretrain sampling/demo.yaml --set pretrain.kind=agent --out policies/agent` from `demo`: seed {seed},
{steps} steps, {cost}; saved in float16. Its worlds have seeds from {10**6 * (seed + 11)} on. What it was shown is by
noisy rules that see the question and what was found, and never a gold document. The log is `pretrain.jsonl`.

As a writer of queries (what each figure is: `leret.demo.pretrain.probe`):

{measured}
"""
