"""The tree of a question: states on its path, samples at each, and samples that continued."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from leret.core.types import Sample
from leret.sampling.store.store import sample_of
from leret.viewer.index import RunIndex

_PROGRAM = """
SELECT ifnull((SELECT min(hop) FROM facts.results WHERE completion NOTNULL), 1) AS first_hop, EXISTS (
    SELECT 1 FROM facts.results r JOIN facts.tasks t ON t.id = r.question_id
    WHERE r.completion NOTNULL AND substr(r.query, 1, length(t.text) + 1) = t.text || ' '
) AS adds
"""
"""The first hop after a completion, and whether searches are the question with words added."""

_NUMBERED = re.compile(r'^"(\d+) (.+?)",?$', re.MULTILINE)
"""A numbered line of a prompt, in indented JSON."""

_NOTHING = ("[question]", "nothing")
"""Picks and completions that add no words to the question."""

_TOKENS = "SELECT id, text FROM facts.tokens WHERE id IN (SELECT value FROM json_each(?))"

Ranks = Mapping[str, int | None]
"""Rank of each gold document (from 1), or of its first chunk; None if it is missing."""


@dataclass
class Card:
    """Samples of a group with the same completion, ranking and reward.

    ``choices`` are the texts of numbered lines in the prompt; ``beats`` are numbers of other cards.
    """

    samples: list[Sample]
    ranks: Ranks
    choices: Mapping[str, str]
    is_chosen: bool = False
    beats: set[int] = field(default_factory=set)

    @property
    def query(self) -> str | None:
        """The output with "query" in its name, which is the search; None if there is none."""
        for name, text in self.samples[0].outputs.items():
            if "query" in name.lower() and isinstance(text, str):
                return text
        return None

    @property
    def words(self) -> str:
        """The query, or all outputs; the completion if it does not parse.

        The number of a choice is replaced by its text.
        """
        outputs = self.samples[0].outputs
        if self.query is not None:
            return self.query
        if len(outputs) == 1:
            text = str(*outputs.values())
            return self.choices.get(text, text)
        lines = [f"{name}: {text}" for name, text in outputs.items()]
        return "\n".join(lines) or self.samples[0].completion or ""


@dataclass(frozen=True)
class Group:
    """The samples of a policy at a state, best first.

    ``before`` is the ranking that they started from.
    """

    row: sqlite3.Row  # of its first sample, with `policy`, `predictor`, `outcome` and the state
    cards: Sequence[Card]
    before: Sequence[str]
    ranks: Ranks  # of ``before``
    messages: Sequence[Mapping[str, Any]]


class Tree:
    """Texts, gold documents, groups and evaluated systems of a question in one run."""

    def __init__(self, index: RunIndex, question_id: str) -> None:
        self._index = index
        self.id = question_id
        self.text = index.one("SELECT text FROM questions WHERE question_id = ?", (question_id,))
        tasks = index.read("SELECT type, answers FROM facts.tasks WHERE id = ?", (question_id,))
        self.type: str | None = None
        self.answers: list[str] = []
        if tasks:
            self.type = tasks[0]["type"]
            self.answers = json.loads(tasks[0]["answers"])
        gold = index.read(
            "SELECT doc_id, in_corpus FROM facts.gold WHERE question_id = ?", (question_id,)
        )
        self.gold = {row["doc_id"]: row["in_corpus"] for row in gold}
        self.documents: dict[str, sqlite3.Row] = {}
        [self._program] = index.cached(_PROGRAM, {}, list)

    def search(self, card: Card) -> tuple[str, str]:
        """Return the question, if the program searches with it and a card's words, and the words."""
        if not self._program["adds"] or card.query is not None or not card.samples[0].outputs:
            return "", card.words
        return self.text, "" if card.words in _NOTHING else card.words

    def token_texts(self, sample: Sample) -> dict[int, str]:
        """Return the text of each token id of a sample, if it is known."""
        rows = self._index.read(_TOKENS, (json.dumps(sample.token_ids),))
        return {row["id"]: row["text"] for row in rows}

    def policies(self) -> list[sqlite3.Row]:
        """Return digest and name of the question's policies, in order of sampling."""
        sql = (
            "SELECT DISTINCT digest, name FROM policies JOIN groups ON policy_digest = digest AND "
            "question_id = ?"
        )
        return self._index.read(f"{sql} ORDER BY place", (self.id,))

    def groups(self, digest: str | None = None, state_id: str | None = None) -> list[Group]:
        """Return the groups of a policy at a state (default: all), by policy and step."""
        sql = (
            "SELECT s.*, t.predictor, t.messages, t.inputs, p.name AS policy_name, v.chosen, v.outcome, "
            "b.doc_ids AS before FROM policies p CROSS JOIN run.samples s ON s.policy_digest = "
            "p.digest AND s.question_id = :q JOIN run.states t ON (t.id, t.question_id) = "
            "(s.state_id, s.question_id) LEFT JOIN run.visits v ON (v.question_id, v.step, "
            "v.policy_digest) = (s.question_id, s.step, s.policy_digest) LEFT JOIN run.samples b "
            "ON b.id = v.parent WHERE ifnull(:digest, s.policy_digest) = s.policy_digest AND "
            "ifnull(:state, s.state_id) = s.state_id ORDER BY p.place, s.step, s.state_id, "
            "length(s.prompt), s.prompt, s.n"
        )
        rows = self._index.read(sql, {"q": self.id, "digest": digest, "state": state_id})
        rankings: list[list[str]] = []
        for row in rows:
            rankings.append(json.loads(row["doc_ids"] or "[]"))
            rankings.append(json.loads(row["before"] or "[]"))
        self._add_documents(rankings)
        groups = groupby(rows, lambda row: (row["policy_digest"], row["step"], row["state_id"]))
        return [self._group(list(members)) for _, members in groups]

    def paths(self) -> dict[str, list[dict[str, Any]]]:
        """Return the steps of each policy's sampled path, and the hops of each evaluated system.

        Both have the ranks of the gold documents.
        """
        paths: dict[str, list[dict[str, Any]]] = {}
        for group in self.groups():
            card = next((card for card in group.cards if card.is_chosen), group.cards[0])
            if card.samples[0].is_sampled:
                search = " ".join(self.search(card)).strip()
                hop = group.row["step"] + self._program["first_hop"]
                step = {"hop": hop, "query": search, "ranks": card.ranks}
                paths.setdefault(f"sampled: {group.row['policy_name']}", []).append(step)
        rows = self._index.read(
            "SELECT * FROM facts.results WHERE question_id = ? ORDER BY number, system, hop",
            (self.id,),
        )
        self._add_documents(json.loads(row["doc_ids"]) for row in rows)
        for row in rows:
            step = {**row, "ranks": self._ranks(json.loads(row["doc_ids"]))}
            paths.setdefault(row["system"], []).append(step)
        return paths

    def title(self, doc_id: str) -> str:
        return self._value(doc_id, "title") or doc_id

    def is_gold(self, doc_id: str) -> bool:
        return self._parent(doc_id) in self.gold

    def _parent(self, doc_id: str) -> str:
        return self._value(doc_id, "parent") or doc_id

    def _value(self, doc_id: str, column: str) -> str | None:
        document = self.documents.get(doc_id)
        if document is None:
            return None
        value: str | None = document[column]
        return value

    def _ranks(self, doc_ids: Sequence[str]) -> Ranks:
        ranks: dict[str, int] = {}
        for rank, doc_id in enumerate(doc_ids, start=1):
            ranks.setdefault(self._parent(doc_id), rank)
        return {doc_id: ranks.get(doc_id) for doc_id in self.gold}

    def _group(self, rows: Sequence[sqlite3.Row]) -> Group:
        cards: dict[tuple[Any, ...], Card] = {}
        inputs = json.dumps(json.loads(rows[0]["inputs"]), indent=0, ensure_ascii=False)
        choices = dict(_NUMBERED.findall(inputs))
        for row in rows:
            sample = sample_of(row)
            key = sample.completion, sample.doc_ids, sample.reward, sample.failure
            card = cards.setdefault(key, Card([], self._ranks(sample.doc_ids), choices))
            card.samples.append(sample)
            card.is_chosen |= sample.id == row["chosen"]
        ordered = sorted(cards.values(), key=lambda card: -(card.samples[0].reward or 0.0))
        ordered.sort(key=lambda card: card.samples[0].reward is None)
        numbers: dict[str, int] = {}
        for n, card in enumerate(ordered, start=1):
            for sample in card.samples:
                numbers[sample.id] = n
        sql = (
            "SELECT chosen_id, rejected_id FROM facts.pairs WHERE question_id = ? AND state_id = ?"
        )
        for chosen, rejected in self._index.read(sql, (self.id, rows[0]["state_id"])):
            if chosen in numbers and rejected in numbers:
                ordered[numbers[chosen] - 1].beats.add(numbers[rejected])
        before = json.loads(rows[0]["before"] or "[]")
        return Group(rows[0], ordered, before, self._ranks(before), json.loads(rows[0]["messages"]))

    def _add_documents(self, rankings: Iterable[Sequence[str]]) -> None:
        doc_ids = {*self.gold, *chain.from_iterable(rankings)}
        new = doc_ids - self.documents.keys()
        sql = "SELECT * FROM facts.documents WHERE doc_id IN (SELECT value FROM json_each(?))"
        for row in self._index.read(sql, (json.dumps(sorted(new)),)):
            self.documents[row["doc_id"]] = row
