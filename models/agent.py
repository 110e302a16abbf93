"""Build the policy `agent`: policy `demo`, trained to answer every LM call of a program that searches.

It imitates ReAct steps, notes, reasoning, answers and queries from notes, in the format of
``CompactAdapter(outputs=True)`` and with many field and tool names. The demonstrators see the question and the
retrieved passages, but never a gold document, and stop at random. So rewards have good and bad paths to separate.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dspy

from leret.core.progress import Progress
from leret.core.types import Passage, merge
from leret.policies.checkpoints import find_model
from leret.policies.local.model import load_weights
from leret.programs.adapters import CompactAdapter
from leret.programs.mentions import content_words, names
from leret.retrieval.base import Retriever
from models import words
from models.gate import make_gate
from models.pretrain.examples import encoded
from models.pretrain.heuristics import Draft, draw
from models.pretrain.loop import Row, train
from models.scratch import MIXED, SECOND, training_facts
from models.worlds import StreamSettings, drafts, query_rows, rows, start, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTIONS, CONTEXTS = ("question", "claim"), ("context", "notes", "passages", "documents")
QUERIES, NOTES = ("query", "search_query"), ("new_notes", "note", "notes", "summary")
TOOLS = (
    *("search", "look_up", "lookup", "retrieve", "find", "search_tool", "search_corpus", "search_index"),
    *("search_documents", "search_docs", "search_passages", "search_wikipedia", "search_wiki", "find_documents"),
    *("find_passages", "get_passages", "get_documents", "wikipedia", "wiki", "bm25"),
)
"""Names that the policy can write: fields, and tools with a single argument ``query``."""

_THOUGHTS = (
    *("i look for {}", "i need to know more about {}", "let me search for {}", "next is {}", "who or what is {} ?"),
    *("the question is about {}", "first find {}", "is there more on {} ?"),
)
_ENOUGH = ("this is enough to answer", "all of it is found", "i know the answer", "there is no more to look for")
_REASONS = ("the passage on {} says so", "it is said of {}", "{} has the answer", "as i read about {}")
_OTHERS = (
    "reasoning answer titles trajectory outputs next_thought next_tool_name next_tool_args yes no list dict finish "
    "completed"
)
_PATTERNS = {  # answer kind: its pattern in a passage
    "city": r"(?:born in \d+|based|company) in (\w+)",
    "university": r"(\w+ University)",
    "award": r"won the (\w+ \w+)",
    "instrument": r"played the (\w+)",
    "year": r"\b(\d{4})\b",
}
_STOPS = (0.0, 0.15, 0.5, 0.85)
"""Probability that an agent finishes, by number of searches so far."""

_ADAPTER = CompactAdapter(outputs=True)
_TRAINING = replace(SECOND, steps=1600, decay_from=0.5, checkpoint_every=100, probe_every=800)
_MIX = replace(MIXED, questions=200, uses=2, demos=(0.1, 0.1), lists=(0.0, 0.0))
_Call = tuple[Any, Mapping[str, Any], list[dict[str, Any]]]
"""A signature, inputs, and alternative outputs."""


def vocabulary() -> list[str]:
    """Return the words of policy `demo` in order, followed by the new words."""
    known = words.vocabulary()
    steps = [f"{part}_{i}" for part in ("thought", "tool_name", "tool_args", "observation") for i in range(10)]
    said = " ".join((*_THOUGHTS, *_ENOUGH, *_REASONS, _OTHERS)).replace("{}", "").split()
    new = {*QUESTIONS, *CONTEXTS, *QUERIES, *NOTES, *TOOLS, *steps, *said, *'{}[]"()|:,.-'}
    return [*known, *sorted(new - set(known))]


def agent_rows(tokenizer: PreTrainedTokenizerFast, seed: int, settings: StreamSettings) -> list[Row]:
    """Return rows of a new world: query rows as for policy `demo`, and calls of programs that search."""
    later, (begun, retriever) = drafts(seed, settings), start(seed, settings)
    calls = [call for draft in later for call in _single_calls(draft, settings)]
    calls += [call for draft in begun for call in _agent_calls(draft, retriever, settings)]
    return query_rows(tokenizer, later, settings) + [_row(tokenizer, *call) for call in calls]


def _row(tokenizer: PreTrainedTokenizerFast, signature: Any, inputs: Any, outputs: Sequence[Mapping[str, Any]]) -> Row:
    texts = [_ADAPTER.format_assistant_message_content(signature, one) for one in outputs]
    return encoded(tokenizer, _ADAPTER.format(signature, (), inputs), texts)


def _single_calls(draft: Draft, settings: StreamSettings) -> Iterator[_Call]:
    rng = draft.rng
    noted = replace(draft, passages=tuple(Passage("", "", note(draft)["note"], 0.0) for _ in range(rng.randint(1, 3))))
    for shown, styles in ((replace(draft, passages=()), settings.hop1), (draft, settings.hop2), (noted, settings.hop2)):
        name = rng.choice(QUERIES)
        queries = [write(draw(rng, styles), shown) for _ in range(6)]
        yield _call(shown, [{"reasoning": _thought(rng, query), name: query} for query in queries])
    name, taken = rng.choice(NOTES), [note(draft) for _ in range(5)]
    outputs: list[dict[str, Any]] = [{"reasoning": one["reasoning"], name: one["note"]} for one in taken]
    if rng.random() < 0.3:
        outputs = [{"reasoning": one["reasoning"], name: [one["note"]], "titles": [one["title"]]} for one in taken]
    before = [passage.text for passage in noted.passages] if name != "notes" and rng.random() < 0.3 else []
    yield _call(draft, outputs, before)
    yield _call(draft, [answer(draft) for _ in range(4)])


_signature = cache(dspy.Signature)


def _call(draft: Draft, outputs: list[dict[str, Any]], notes: Sequence[str] = ()) -> _Call:
    """Return a call for a draft with passages and notes. Half of the calls have no reasoning, 30 % no titles."""
    rng, asked = draft.rng, draft.rng.choice(QUESTIONS)
    context = rng.choice([name for name in CONTEXTS if name not in outputs[0] and (name != "notes" or not notes)])
    if rng.random() < 0.5:
        outputs = [{name: value for name, value in one.items() if name != "reasoning"} for one in outputs]
    types = ", ".join(f"{name}: {'list[str]' if isinstance(one, list) else 'str'}" for name, one in outputs[0].items())
    inputs: dict[str, Any] = {asked: draft.question, **({"notes": list(notes)} if notes else {})}
    titled = rng.random() < 0.7
    inputs[context] = [f"{p.title} | {p.text}" if p.title and titled else p.text for p in draft.passages]
    return _signature(f"{', '.join(inputs)} -> {types}"), inputs, outputs


def _thought(rng: random.Random, query: str) -> str:
    return rng.choice(_THOUGHTS).format(" ".join(query.split()[: rng.randint(1, 3)]))


def note(draft: Draft) -> dict[str, str]:
    """Note a clause of a passage (often the passage with the question's rarest words), with or without its title."""
    asked, rng = set(content_words(draft.question.lower())), draft.rng

    def weight(text: str) -> float:
        return sum(draft.idf(word) for word in sorted(asked & set(content_words(text.lower()))))

    near = rng.random() < 0.5
    passage = max(draft.passages, key=lambda p: weight(p.text)) if near else rng.choice(draft.passages)
    clauses = [part.strip(" .") for part in re.split(r"(?<=\.)\s+|, | and ", passage.text)]
    clauses = [part for part in clauses if len(part.split()) > 2] or [passage.text]
    clause = max(clauses, key=weight) if near and rng.random() < 0.5 else rng.choice(clauses)
    clause = " ".join(clause.split()[:16])
    text = clause if rng.random() < 0.5 or passage.title in clause else f"{passage.title} : {clause}"
    return {"reasoning": rng.choice(_REASONS).format(passage.title), "note": text, "title": passage.title}


def answer(draft: Draft) -> dict[str, Any]:
    """Answer with a text of the right kind, often from a passage that another passage names, or else with a name."""
    rng, question = draft.rng, draft.question
    linked = [p for p in draft.passages if any(p.title in other.text for other in draft.passages if other is not p)]
    passage = rng.choice(linked if linked and rng.random() < 0.6 else draft.passages)
    kind = next((kind for kind in _PATTERNS if kind in question and " or " not in question), None)
    matches = re.findall(_PATTERNS[kind], passage.text) if kind else []
    text = rng.choice(["yes", "no"] if question.startswith("Is ") else matches or names(question) or [passage.title])
    return {"reasoning": rng.choice(_REASONS).format(passage.title), "answer": text}


@cache
def _agent(asked: str, tool: str) -> dspy.ReAct:
    return dspy.ReAct(f"{asked} -> answer", tools=[dspy.Tool(lambda query: query, name=tool)])


def _agent_calls(draft: Draft, retriever: Retriever, settings: StreamSettings) -> Iterator[_Call]:
    """Yield the steps and the answer of an agent. Its tool returns passages as strings or as objects."""
    rng, asked, tool = draft.rng, draft.rng.choice(QUESTIONS), draft.rng.choice(TOOLS)
    agent, k, rows_of = _agent(asked, tool), rng.choice((2, 3)), rng.random() < 0.3
    trajectory: dict[str, Any] = {}

    def step(stop: float) -> dict[str, Any]:
        if rng.random() < stop:
            return {"next_thought": rng.choice(_ENOUGH), "next_tool_name": "finish", "next_tool_args": {}}
        query = write(draw(rng, settings.hop2 if draft.passages else settings.hop1), draft)
        return {"next_thought": _thought(rng, query), "next_tool_name": tool, "next_tool_args": {"query": query}}

    def inputs() -> dict[str, str]:
        shown = _ADAPTER.format_user_message_content(_signature(f"{', '.join(trajectory)} -> x"), trajectory)
        return {asked: draft.question, "trajectory": shown}

    for n, stop in enumerate(_STOPS):
        yield agent.react.signature, inputs(), [step(stop) for _ in range(5)]
        taken = step(0.0)
        [ranking] = retriever.search([taken["next_tool_args"]["query"]], k)
        shown = [f"{p.title} | {p.text}" for p in ranking]
        trajectory |= {f"{name.removeprefix('next_')}_{n}": value for name, value in taken.items()}
        trajectory[f"observation_{n}"] = (
            [{"id": p.doc_id, "text": t} for p, t in zip(ranking, shown, strict=True)] if rows_of else shown
        )
        draft = replace(draft, passages=merge([draft.passages, ranking]))
        if rng.random() < 0.4:
            break
    trajectory |= {f"{name.removeprefix('next_')}_{n + 1}": value for name, value in step(1.0).items()}
    trajectory[f"observation_{n + 1}"] = "Completed."
    yield agent.extract.predict.signature, inputs(), [answer(draft) for _ in range(4)]


def pretrain_agent(out: Path, progress: Progress, *, seed: int = 0, steps: int | None = None) -> Path:
    """Train policy `agent` in ``out`` from `demo`, or continue; arguments are as for `pretrain_scratch`."""
    import torch
    from transformers import AutoModelForCausalLM

    steps = steps or _TRAINING.steps
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = words.build_tokenizer(vocabulary())
    tokenizer.save_pretrained(out)
    model, demo = words.build_model(len(tokenizer), seed), load_weights(find_model("demo"), "float32").state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight[: len(demo[name])] = demo[name]  # rows of new words keep their random values
    stream = rows(tokenizer, replace(_MIX, seed=seed + 10), agent_rows)
    settings = replace(_TRAINING, steps=steps, seed=seed)
    train(model, stream, settings, out, progress, probe=make_gate(tokenizer))
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16).save_pretrained(out)
    cost, measured = training_facts(out / "pretrain.jsonl")
    card = _CARD.format(seed=seed, steps=steps, cost=cost, measured=measured, world=10**6 * (seed + 11))
    (out / "README.md").write_text(card, encoding="utf-8")
    return out


_CARD = f"""# A tiny policy for programs that search

`demo`, trained on to answer every call of a program, not queries alone: ReAct steps, notes, reasons, answers. It reads
`leret.CompactAdapter(outputs=True)`, and knows the words of leret's generated worlds and these names:

- fields: {", ".join((*QUESTIONS, *CONTEXTS, *QUERIES, *NOTES))}, reasoning, titles, answer
- tools, with the one argument `query`: {", ".join(TOOLS)}

Made by `python -m models agent` from `demo`: seed {{seed}},
{{steps}} steps, {{cost}}; saved in float16. Its worlds have seeds from {{world}} on. What it was shown is by noisy
rules that see the question and what was found, and never a gold document. The log is `pretrain.jsonl`.

As a writer of queries (what each figure is: `models.gate`):

{{measured}}
"""
