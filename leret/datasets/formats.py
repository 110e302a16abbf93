"""A format: how one record of a file becomes a question, and how it becomes documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leret.datasets.problems import BadRecord
from leret.types import Document, Question

__all__ = ["Format", "sentences"]


@dataclass(frozen=True, slots=True)
class Format:
    """Reads the records of one kind of file. Both functions raise `BadRecord`.

    Attributes:
        name: as messages call it.
        question: a record to a question.
        documents: a record to the documents in it: one in a corpus, many in the contexts of a question file.
        shared: the same document may come again, in another question's context; the first one is kept.
    """

    name: str
    question: Callable[[Mapping[str, Any]], Question]
    documents: Callable[[Mapping[str, Any]], Iterable[Document]]
    shared: bool = False


def sentences(value: Any, title: str) -> str:
    """Text of a document that is kept as a list of sentences, or as one string.

    Raises:
        BadRecord: it is neither.
    """
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, Sequence) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRecord("wrong type", f"the text of {title!r} is {str(value)[:60]}; it should be a list of sentences")
    return " ".join(sentence.strip() for sentence in value)
