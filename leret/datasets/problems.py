"""What is wrong with a file: collected, so that it is mended once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from leret.errors import DataError

__all__ = ["BadRecord", "Problems"]

_SHOWN = 20

FIELDS = (
    "in JSON lines a question has id, question, relevant_doc_ids (where known answer, type, hops, split, relevance), "
    "a document doc_id, title, text"
)


class BadRecord(Exception):
    """One record that is not what its file claims to hold; never leaves this package.

    Args:
        kind: a few words that records of one fault share; they are counted by it.
        message: what is wrong, with the value.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Problems:
    """Collects the bad records of one reading.

    Attributes:
        shown: the first of them, one line each: place and fault.
        kinds: how many there are of each kind.
    """

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.kinds: Counter[str] = Counter()

    def add(self, place: str, problem: BadRecord) -> None:
        """Take note of a bad record.

        Args:
            place: file and line, or file and item.
            problem: what is wrong there.
        """
        self.kinds[problem.kind] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{place}: {problem}")

    @property
    def n(self) -> int:
        """How many bad records there are."""
        return self.kinds.total()

    def check(self, source: str, skip_bad: bool, any_good: bool = True) -> Mapping[str, int]:
        """End of the reading: refuse the source, or count what was skipped.

        Args:
            source: the file, as messages call it.
            skip_bad: count.
            any_good: the source has records that are not bad; one without any is refused in any case.

        Returns:
            How many records were skipped, by kind of fault.

        Raises:
            DataError: there are bad records, and ``skip_bad`` is off.
        """
        if not self.n or (skip_bad and any_good):
            return dict(self.kinds)
        more = [f"and {self.n - len(self.shown)} more"] if self.n > len(self.shown) else []
        fields = [FIELDS] if self.kinds["missing field"] else []
        lines = "\n  ".join([*self.shown, *more, *fields])
        advice = ", or leave them out with data.skip_bad (--skip-bad), which counts them" if any_good else ""
        raise DataError(
            f"{source}: {self.n} bad {'record' if self.n == 1 else 'records'}\n  {lines}\nmend them{advice}"
        )
