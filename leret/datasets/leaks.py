"""Leaks between training and evaluation: questions with equal ids, texts, words or gold documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leret.core.errors import DataError
from leret.core.files import write_atomically
from leret.core.types import Task
from leret.datasets.formats.conversations import plain, utterances

FINGERPRINTS = "pretrain-texts.txt"
"""File in a policy's directory, with a `fingerprint` of each text that the policy learned from."""

_SHOWN = 5
_SHORT = 3  # words; shorter replies ("i do") are the same in many dialogues

_KINDS = {
    "id": "with the same id",
    "text": "with the same text",
    "words": "with the same words in another order",
    "pretraining": "with the words of a text from pretraining",
    "gold": "with the same gold documents",
    "reply": "with a reply from a training dialogue",
}
"""Kinds of leaks, worst first."""


def find_leaks(
    evaluation: Sequence[Task],
    training: Sequence[Task],
    pretrained: Collection[str] = (),
    unknown: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare each evaluation question with all training questions, in linear time.

    Texts are equal without regard to case, punctuation, spaces and accents. Equal sets of gold documents count from two
    documents. The reply of a dialogue is compared with all utterances of the training dialogues. ``pretrained`` are
    results of `fingerprint`; ``unknown`` names models without a record of their texts.

    Returns:
        JSON values: the counts, the first ``examples``, and a ``verdict`` of one line. A question counts once.
    """
    known: dict[str, dict[Any, str | None]] = {kind: {} for kind in _KINDS}
    for task in training:
        for kind, key in (*_keys(task), *_utterance_keys(utterances(task))):
            known[kind].setdefault(key, task.id)
    known["pretraining"] = dict.fromkeys(pretrained)
    gold = {doc_id for task in training for doc_id in task.gold}
    pairs, n_shared = list[tuple[str, str, str | None]](), 0
    for task in evaluation:
        keys = (*_keys(task), *_utterance_keys(utterances(task)[-1:]))
        pair = next(
            ((task.id, kind, known[kind][key]) for kind, key in keys if key in known[kind]), None
        )
        if pair is not None:
            pairs.append(pair)
        else:
            n_shared += not gold.isdisjoint(task.gold)
    by_kind = Counter(kind for _, kind, _ in pairs)
    result = {
        "n_questions": len(evaluation),
        "n_trained": len(training),
        "n_pretrained": len(pretrained),
        "by_kind": {kind: by_kind[kind] for kind in _KINDS},
        "n_shared_gold": n_shared,
        "unknown": list(unknown),
        "examples": [
            {"id": one, "kind": kind, "training_id": other} for one, kind, other in pairs[:_SHOWN]
        ],
    }
    return {"verdict": _verdict(result), **result}


def _verdict(leaks: Mapping[str, Any]) -> str:
    n, n_shared_gold = sum(leaks["by_kind"].values()), leaks["n_shared_gold"]
    compared = f"one of {leaks['n_trained']:,} training questions"
    if leaks["n_pretrained"]:
        compared += f" or {leaks['n_pretrained']:,} texts from pretraining"
    kinds = ", ".join(
        f"{count:,} {_KINDS[kind]}" for kind, count in leaks["by_kind"].items() if count
    )
    if n:
        verb = "resemble" if n > 1 else "resembles"
        parts = [
            f"look at these: {n:,} of {leaks['n_questions']:,} questions {verb} {compared}: {kinds}"
        ]
    else:
        parts = [f"passed, none of {leaks['n_questions']:,} questions resembles {compared}"]
    if n_shared_gold:
        parts.append(
            f"{n_shared_gold:,} share only a gold document with a training question, which is no leak"
        )
    if leaks["unknown"]:
        parts.append(
            f"not compared with the texts that {', '.join(leaks['unknown'])} learned from, which are unknown"
        )
    return "leak check: " + "; ".join(parts)


def write_fingerprints(directory: Path, texts: Iterable[str]) -> None:
    """Record the texts that a policy learns from; the texts cannot be read back from the record."""
    write_atomically(
        directory / FINGERPRINTS,
        "".join(f"{one}\n" for one in sorted(set(map(fingerprint, texts)))),
    )


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits that depend on the words of a text, not on their order, case or punctuation.

    >>> fingerprint("Is Ed Wood older?") == fingerprint("older: is ed wood")
    True
    """
    return _digest(_words(text))


def _digest(words: Iterable[str]) -> str:
    return blake2b(
        " ".join(sorted(words)).encode("utf-8", "surrogatepass"), digest_size=8
    ).hexdigest()


def _keys(task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the kinds of leaks, worst first, with a key that is equal if there is such a leak."""
    yield "id", task.id
    if words := _words(task.text):
        yield "text", hash("".join(words))
        yield "words", _digest(words)
        yield "pretraining", _digest(words)
    if len(task.gold) > 1:
        yield "gold", frozenset(task.gold)


def _utterance_keys(texts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for text in texts:
        if len(text.split()) >= _SHORT:
            yield "reply", hash(text)


def _words(text: str) -> list[str]:
    return plain(text).split()


def refuse_leaks(training: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Raise a DataError if training and evaluation have ids or texts in common. Its message lists the first ids."""
    ids, texts = {task.id for task in training}, {task.text for task in training}
    _refuse(
        sorted(task.id for task in evaluation if task.id in ids),
        "are in both the training data and the evaluation split",
        "sample from split train, and evaluate on dev or test with the same seed",
    )
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
