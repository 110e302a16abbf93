"""Leaks between training and evaluation: questions with equal ids, texts, words or gold documents."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leret.core.errors import DataError
from leret.core.files import write_atomically
from leret.core.types import Task

FINGERPRINTS = "pretrain-texts.txt"
"""File in a policy's directory, with a `fingerprint` of each text that the policy learned from."""

_SHOWN = 5

_KINDS = {
    "id": "with the same id",
    "text": "with the same text",
    "words": "with the same words in another order",
    "pretraining": "with the words of a text from pretraining",
    "gold": "with the same gold documents",
}
"""Kinds of leaks, worst first."""


@dataclass(frozen=True, slots=True)
class Leaks:
    """Evaluation questions that resemble training questions.

    Attributes:
        pairs: (evaluation question, kind, training question); None for a text from pretraining. One pair per question.
        n_shared_gold: other questions that share a gold document with a training question.
        unknown: models without a record of the texts that they learned from.
    """

    n_questions: int
    n_trained: int
    n_pretrained: int
    pairs: Sequence[tuple[str, str, str | None]]
    n_shared_gold: int
    unknown: Sequence[str]

    @property
    def by_kind(self) -> dict[str, int]:
        counts = Counter(kind for _, kind, _ in self.pairs)
        return {kind: counts[kind] for kind in _KINDS}

    @property
    def verdict(self) -> str:
        """The result in one line."""
        n = len(self.pairs)
        pretrained = f" or {self.n_pretrained:,} texts from pretraining" if self.n_pretrained else ""
        compared = f"one of {self.n_trained:,} training questions{pretrained}"
        result = f"{n or 'none'} of {self.n_questions:,} questions {'resemble' if n > 1 else 'resembles'} {compared}"
        kinds = [f"{count:,} {_KINDS[kind]}" for kind, count in self.by_kind.items() if count]
        parts = [f"{result}: {', '.join(kinds)}" if kinds else result]
        if self.n_shared_gold:
            parts.append(f"only a gold document in common: {self.n_shared_gold:,}")
        if self.unknown:
            parts.append(f"the texts that {', '.join(self.unknown)} learned from are unknown")
        return "leak check: " + "; ".join(parts)

    def facts(self) -> dict[str, Any]:
        """Return JSON values for summary.json."""
        examples = [{"id": one, "kind": kind, "training_id": other} for one, kind, other in self.pairs[:_SHOWN]]
        names = ("verdict", "n_trained", "n_pretrained", "by_kind", "n_shared_gold", "unknown")
        return {name: getattr(self, name) for name in names} | {"examples": examples}


def find_leaks(
    evaluation: Sequence[Task], training: Sequence[Task], pretrained: Collection[str] = (), unknown: Sequence[str] = ()
) -> Leaks:
    """Compare each evaluation question with all training questions, in linear time.

    Texts are equal without regard to case, punctuation, spaces and accents. Equal sets of gold documents count from two
    documents. ``pretrained`` are results of `fingerprint`; ``unknown`` names models without a record of their texts.
    """
    known: dict[str, dict[Any, str | None]] = {kind: {} for kind in _KINDS}
    for task in training:
        for kind, key in _keys(task):
            known[kind].setdefault(key, task.id)
    known["pretraining"] = dict.fromkeys(pretrained)
    gold = {doc_id for task in training for doc_id in task.gold}
    pairs, n_shared = list[tuple[str, str, str | None]](), 0
    for task in evaluation:
        pair = next(((task.id, kind, known[kind][key]) for kind, key in _keys(task) if key in known[kind]), None)
        if pair is not None:
            pairs.append(pair)
        else:
            n_shared += not gold.isdisjoint(task.gold)
    return Leaks(len(evaluation), len(training), len(pretrained), pairs, n_shared, unknown)


def write_fingerprints(directory: Path, texts: Iterable[str]) -> None:
    """Record the texts that a policy learns from; the texts cannot be read back from the record."""
    write_atomically(directory / FINGERPRINTS, "".join(f"{one}\n" for one in sorted(set(map(fingerprint, texts)))))


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits that depend on the words of a text, not on their order, case or punctuation.

    >>> fingerprint("Is Ed Wood older?") == fingerprint("older: is ed wood")
    True
    """
    return _digest(_words(text))


def _digest(words: Iterable[str]) -> str:
    return blake2b(" ".join(sorted(words)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _keys(task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the kinds of leaks, worst first, with a key that is equal if there is such a leak."""
    yield "id", task.id
    if words := _words(task.text):
        yield "text", hash("".join(words))
        yield "words", _digest(words)
        yield "pretraining", _digest(words)
    if len(task.gold) > 1:
        yield "gold", frozenset(task.gold)


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", text).casefold().replace("'", "").replace("’", "")
    return re.findall(r"\w+", "".join(char for char in plain if not unicodedata.combining(char)))


def refuse_leak(training_ids: Iterable[str], evaluation_ids: Iterable[str]) -> None:
    """Raise a DataError if training and evaluation have ids in common. Its message lists the first ids."""
    _refuse(
        sorted(set(training_ids) & set(evaluation_ids)),
        "are in both the training data and the evaluation split",
        "sample from split train, and evaluate on dev or test with the same seed",
    )


def refuse_doubles(training: Iterable[Task], evaluation: Iterable[Task]) -> None:
    """Raise a DataError if a training task and an evaluation task have the same text."""
    texts = {task.text for task in training}
    _refuse(
        [task.id for task in evaluation if task.text in texts],
        "of the evaluation split have the same text as a training question",
        "remove them from the question file",
    )


def _refuse(ids: Sequence[str], fault: str, advice: str) -> None:
    if ids:
        shown = ", ".join(repr(id) for id in ids[:_SHOWN])
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        raise DataError(f"{len(ids)} questions {fault}: {shown}{more}; {advice}")
