"""TREC run and qrels files, for every other tool of the field.

The format separates its fields by white space, so white space and ``%`` in ids are percent-encoded (UTF-8); every
other character stays as it is. `urllib.parse.unquote` undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from leret.core.files import write_atomically
from leret.core.types import Task

_UNSAFE = re.compile(r"[\s%\x00-\x20\x7f-\xa0\u200b\ufeff\ud800-\udfff]")


def escape(text: str) -> str:
    """An id without white space.

    >>> escape("Ed Wood (film) 100%")
    'Ed%20Wood%20(film)%20100%25'
    """
    return _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), text)


def unescape(text: str) -> str:
    """What ``escape`` was given."""
    return unquote(text, errors="surrogatepass")


def write_run(path: Path, tag: str, rankings: Iterable[tuple[str, Sequence[str], Sequence[float]]]) -> None:
    """Write ``qid Q0 docid rank score tag`` lines.

    Readers of the format sort by score and break ties in ways of their own, some in single precision. So that all of
    them see the order that leret scored, a score that does not fall below the one before it is written one step of
    single precision lower.

    Args:
        path: of the file; replaced whole.
        tag: the system's name.
        rankings: question id, document ids best first, their scores.
    """
    lines = [
        f"{escape(qid)} Q0 {escape(doc_id)} {rank} {score:.9g} {escape(tag)}\n"
        for qid, doc_ids, scores in rankings
        for rank, (doc_id, score) in enumerate(zip(doc_ids, falling(scores), strict=True), start=1)
    ]
    write_atomically(path, "".join(lines))


def write_qrels(path: Path, questions: Iterable[Task]) -> None:
    """Write ``qid 0 docid grade`` lines, one a gold document."""
    lines = [f"{escape(q.id)} 0 {escape(doc_id)} {grade}\n" for q in questions for doc_id, grade in q.grades.items()]
    write_atomically(path, "".join(lines))


def falling(scores: Sequence[float]) -> Iterator[float]:
    """The scores, each one step of single precision below the one before it where it was not below it already."""
    last = np.float32(np.inf)
    for score in scores:
        value = np.float32(score)
        if not value < last:
            value = np.nextafter(last, np.float32(-np.inf))
        last = value
        yield float(value)
