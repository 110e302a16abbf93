"""Hints: a line that names what is still to be found, in prompts for sampling and in those of a teacher.

A policy is trained on what it writes with a hint, but always under the prompt without one. So a hint
names only what the policy could read there: a name with a word that neither the question nor the
passages of the prompt contain is withheld, and cannot become a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from leret.core.types import Document, Messages, Task, merge
from leret.programs.mentions import words_of
from leret.programs.needs import NeedsCompletion

_WORDS = 12  # words of a document without a title


@dataclass
class Hints:
    """Writes hints: the missing gold documents, or the reference answer of a task without documents.

    Attributes:
        documents: the corpus, by id.
        chunks: a chunk of each document, if tasks name documents of which the corpus has chunks.
        shown: number of names shown so far; ``withheld``: of names that the prompt does not contain.
    """

    documents: Mapping[str, Document]
    chunks: Mapping[str, str] = field(default_factory=dict)
    shown: int = 0
    withheld: int = 0

    def show(
        self,
        messages: Messages,
        task: Task,
        need: NeedsCompletion,
        zero_shot: Messages | None = None,
    ) -> Messages:
        """Return a prompt with a hint as the first line of its last user message.

        Return it unchanged if there is nothing to name. ``zero_shot`` is the prompt without
        demonstrations, if ``messages`` has some: a policy is trained on that one.
        """
        names = self._readable(task, need, _visible_words(zero_shot or messages))
        last = max((i for i, message in enumerate(messages) if _is_text(message)), default=None)
        if not names or last is None:
            return messages
        what = "; ".join(names)
        # In the form of a passage, as the compact adapter writes it; small policies read no other line.
        label = "still missing" if task.gold else "the answer"
        line = f"{what} | {label}: {what}"
        hinted = {**messages[last], "content": f"{line}\n{messages[last]['content']}"}
        return (*messages[:last], hinted, *messages[last + 1 :])

    def _readable(self, task: Task, need: NeedsCompletion, visible: frozenset[str]) -> list[str]:
        """Return the names to show, and count those that are withheld."""
        names = []
        for name in dict.fromkeys(self._missing(task, need)):
            readable = _readable(name, visible)
            if readable:
                names.append(readable)
            else:
                self.withheld += 1
        self.shown += len(names)
        return names

    def note(self) -> str:
        """Describe the counts for a report."""
        return (
            f"hints named {self.shown:,} missing documents or answers, and withheld "
            f"{self.withheld:,} that neither the question nor the passages contain"
        )

    def _missing(self, task: Task, need: NeedsCompletion) -> Iterator[str]:
        if not task.gold:
            yield from task.answers[:1]
            return
        ranking = merge(chain.from_iterable(search.added for search in need.searches))
        ranked = set(task.gold_ids([passage.doc_id for passage in ranking]))
        for doc_id in task.gold:
            chunk = self.chunks.get(doc_id, doc_id)
            if doc_id not in ranked and chunk in self.documents:
                document = self.documents[chunk]
                yield document.title or " ".join(document.text.split()[:_WORDS])


def _is_text(message: Mapping[str, object]) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _visible_words(messages: Messages) -> frozenset[str]:
    texts = [str(message["content"]) for message in messages if message["role"] != "system"]
    return words_of("\n".join(texts))


def _readable(name: str, visible: frozenset[str]) -> str | None:
    """Return a name that the prompt contains, without ``(...)`` at its end if that is not; else None."""
    for text in (name, name.partition(" (")[0]):
        words = words_of(text)
        if words and words <= visible:
            return text
    return None
