"""Leaks between training and evaluation: equal ids, texts, words or gold documents."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from leret.core.errors import DataError
from leret.core.types import Task

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


@lru_cache(1 << 18)
def plain(text: str) -> str:
    """Return the words of a text, without regard to case, punctuation, spaces and accents."""
    folded = unicodedata.normalize("NFKD", text).casefold().replace("'", "").replace("’", "")
    letters = [char for char in folded if not unicodedata.combining(char)]
    words = re.findall(r"\w+", "".join(letters))
    return " ".join(words)


def utterances(task: Task) -> list[str]:
    """Return the history and the reply of a dialogue's task, with `plain`; else an empty list."""
    history = task.inputs.get("history")
    if not isinstance(history, list):
        return []
    return [plain(str(text)) for text in (*history, *task.answers[:1])]


def find_leaks(
    evaluation: Sequence[Task],
    training: Sequence[Task],
    pretrained: Collection[str] = (),
    unknown: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare each evaluation question with all training questions, in linear time.

    Texts are equal without regard to case, punctuation, spaces and accents. Equal sets of gold
    documents count from two documents. The reply of a dialogue is compared with all utterances of
    the training dialogues. ``pretrained`` are results of `fingerprint`; ``unknown`` names models
    without a record of their texts.

    Returns:
        JSON values: the counts, the first ``examples``, and a ``verdict`` of one line. A question
        counts once.
    """
    trained: dict[str, dict[Any, str | None]] = {kind: {} for kind in _KINDS}
    gold: set[str] = set()
    for task in training:
        gold.update(task.gold)
        for kind, key in _keys(task, utterances(task)):
            trained[kind].setdefault(key, task.id)
    trained["pretraining"] = dict.fromkeys(pretrained)
    leaks = []
    n_shared = 0
    for task in evaluation:
        leak = _worst_leak(task, trained)
        if leak is not None:
            leaks.append(leak)
        elif not gold.isdisjoint(task.gold):
            n_shared += 1
    by_kind = Counter(leak["kind"] for leak in leaks)
    result = {
        "n_questions": len(evaluation),
        "n_trained": len(training),
        "n_pretrained": len(pretrained),
        "by_kind": {kind: by_kind[kind] for kind in _KINDS},
        "n_shared_gold": n_shared,
        "unknown": list(unknown),
        "examples": leaks[:_SHOWN],
    }
    return {"verdict": _verdict(result), **result}


def _worst_leak(
    task: Task, trained: Mapping[str, Mapping[Any, str | None]]
) -> dict[str, str | None] | None:
    reply = utterances(task)[-1:]
    for kind, key in _keys(task, reply):
        if key in trained[kind]:
            return {"id": task.id, "kind": kind, "training_id": trained[kind][key]}
    return None


def _verdict(leaks: Mapping[str, Any]) -> str:
    n_questions = f"{leaks['n_questions']:,}"
    compared = f"one of {leaks['n_trained']:,} training questions"
    if leaks["n_pretrained"]:
        compared += f" or {leaks['n_pretrained']:,} texts from pretraining"
    n_leaks = sum(leaks["by_kind"].values())
    if n_leaks:
        verb = "resemble" if n_leaks > 1 else "resembles"
        counts = [f"{n:,} {_KINDS[kind]}" for kind, n in leaks["by_kind"].items() if n]
        kinds = ", ".join(counts)
        parts = [
            f"look at these: {n_leaks:,} of {n_questions} questions {verb} {compared}: {kinds}"
        ]
    else:
        parts = [f"passed, none of {n_questions} questions resembles {compared}"]
    n_shared = leaks["n_shared_gold"]
    if n_shared:
        parts.append(
            f"{n_shared:,} share only a gold document with a training question, which is no leak"
        )
    if leaks["unknown"]:
        models = ", ".join(leaks["unknown"])
        parts.append(f"not compared with the texts that {models} learned from, which are unknown")
    return "leak check: " + "; ".join(parts)


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits that depend on the words of a text.

    They do not depend on order, case or punctuation.

    >>> fingerprint("Is Ed Wood older?") == fingerprint("older: is ed wood")
    True
    """
    return _digest(_words(text))


def _digest(words: Iterable[str]) -> str:
    content = " ".join(sorted(words)).encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=8).hexdigest()


def _keys(task: Task, replies: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the kinds of leaks, worst first, with a key that is equal if there is such a leak."""
    yield "id", task.id
    words = _words(task.text)
    if words:
        yield "text", hash("".join(words))
        yield "words", _digest(words)
        yield "pretraining", _digest(words)
    if len(task.gold) > 1:
        yield "gold", frozenset(task.gold)
    for reply in replies:
        if len(reply.split()) >= _SHORT:
            yield "reply", hash(reply)


def _words(text: str) -> list[str]:
    return plain(text).split()


def refuse_leaks(training: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Raise a DataError if training and evaluation have ids or texts in common.

    Its message lists the first ids.
    """
    ids = {task.id for task in training}
    shared_ids = [task.id for task in evaluation if task.id in ids]
    _refuse(
        sorted(shared_ids),
        "are in both the training data and the evaluation split",
        "sample from split train, and evaluate on dev or test with the same seed",
    )
    texts = {task.text for task in training}
    with_shared_texts = [task.id for task in evaluation if task.text in texts]
    _refuse(
        with_shared_texts,
        "of the evaluation split have the same text as a training question",
        "remove them from the question file",
    )


def _refuse(ids: Sequence[str], fault: str, advice: str) -> None:
    if not ids:
        return
    shown = ", ".join(map(repr, ids[:_SHOWN]))
    n_more = len(ids) - _SHOWN
    if n_more > 0:
        shown += f" and {n_more} more"
    raise DataError(f"{len(ids)} questions {fault}: {shown}; {advice}")
