"""Split documents into chunks of limited length at sentence ends, for `leret data chunk`.

A chunk has the id ``doc#i`` (``i`` from 0), its document's title, and the document's id as
``parent``. The texts of a document's chunks contain all its words, in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from leret.core.bundled import POLICIES, find_model, policy_path
from leret.core.errors import ConfigError, import_optional
from leret.core.files import atomic_file
from leret.core.types import Document, storable
from leret.datasets.corpus import Corpus

Count = Callable[[Sequence[str]], list[int]]
"""Function that returns the length of each text, in words or tokens."""

_SENTENCE_END = re.compile(
    r"""
    (?<=[.!?…])
    (?<!\b[A-Z]\.) (?<!\b(?:Dr|Mr|Ms|St)\.) (?<!\bMrs\.)  # not after an initial or a title
    ["'”’)\]]* \s+
    (?=[^\sa-z])        # a sentence does not begin with a small letter
    | (?<=[。！？])
    | \n\s*
    """,
    re.VERBOSE,
)
_WORD_END = re.compile(r"\s+")
_CHARACTER_END = re.compile(r"(?<=.)", re.DOTALL)


def write_chunks(corpus: Corpus, out: Path, size: int, count: Count, header: str = "") -> int:
    """Write the chunks of a corpus as JSON lines, and return their number.

    For the arguments, see `chunks_of`.
    """
    try:
        header.format(title="", doc_id="")
    except (LookupError, ValueError, AttributeError) as error:
        advice = "use the fields {title} and {doc_id}, and double other braces"
        raise ConfigError(f"--header {header!r} is not a template ({error!r}); {advice}") from error
    n = 0
    with atomic_file(out) as file:
        for document in corpus.values():
            for chunk in chunks_of(document, size, count, header):
                line = json.dumps(asdict(chunk), ensure_ascii=False)
                file.write(storable(line) + "\n")
                n += 1
    return n


def chunks_of(document: Document, size: int, count: Count, header: str = "") -> Iterator[Document]:
    """Yield the chunks of a document.

    Args:
        document: a document, or a chunk to split again.
        size: length limit of title, header and text together, because retrievers read all of
            them. If title and header take more than half of it, the text may still take half, and
            the chunk is longer.
        count: function that measures texts.
        header: template with ``{title}`` and ``{doc_id}`` for the first line of each chunk's text;
            empty for none.
    """
    first_line = header.format(title=document.title, doc_id=document.doc_id).strip()
    used = sum(count([document.title, first_line]))
    room = max(size - used, size // 2)
    parent = document.parent or document.doc_id
    for i, (start, end) in enumerate(_spans(document.text, room, count)):
        doc_id = f"{document.doc_id}#{i}"
        body = document.text[start:end].strip()
        text = "\n".join(filter(None, [first_line, body]))
        yield replace(document, doc_id=doc_id, text=text, parent=parent)


def count_words(texts: Sequence[str]) -> list[int]:
    """Count words: runs of characters without white space."""
    return [len(text.split()) for text in texts]


def token_counter(tokenizer: str) -> Count:
    """Return a function that counts tokens, without special tokens.

    ``tokenizer`` is a directory with tokenizer.json, the name of a policy that ships with leret, or
    a model's name on the Hugging Face hub. ConfigError if it has no tokenizer.json.
    """
    tokenizers = import_optional("tokenizers", "tokenizers", "train")
    name = str(policy_path(tokenizer)) if tokenizer in POLICIES else tokenizer
    path = find_model(name, "--tokenizer") / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer}: {path} does not exist; name a model with a tokenizer.json"
        )
    model = tokenizers.Tokenizer.from_file(str(path))
    model.no_truncation()
    model.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        valid_texts = [storable(text) for text in texts]
        encodings = model.encode_batch(valid_texts, add_special_tokens=False)
        return [len(encoding) for encoding in encodings]

    return count


def _spans(text: str, room: int, count: Count) -> list[tuple[int, int]]:
    """Return each chunk's start and end: as many sentences as fit.

    Sentences that are too long are split at words or characters.
    """

    def length(spans: Sequence[tuple[int, int]]) -> list[int]:
        return count([text[start:end].strip() for start, end in spans])

    pieces = [(0, len(text))]
    for ends in (_SENTENCE_END, _WORD_END, _CHARACTER_END):
        shorter: list[tuple[int, int]] = []
        for piece, n in zip(pieces, length(pieces), strict=True):
            if n > room:
                shorter += _split(text, piece, ends)
            else:
                shorter.append(piece)
        pieces = shorter
    lengths = length(pieces)
    spans = []
    first = 0
    while first < len(pieces):
        stop = first + 1
        total = lengths[first]
        while stop < len(pieces) and total + lengths[stop] <= room:
            total += lengths[stop]
            stop += 1
        span = (pieces[first][0], pieces[stop - 1][1])
        # A tokenizer may need more tokens for a text than for its parts.
        while stop > first + 1 and length([span])[0] > room:
            stop -= 1
            span = (pieces[first][0], pieces[stop - 1][1])
        spans.append(span)
        first = stop
    return spans


def _split(text: str, span: tuple[int, int], ends: re.Pattern[str]) -> list[tuple[int, int]]:
    cuts = [match.end() for match in ends.finditer(text, *span)]
    spans = pairwise([span[0], *cuts, span[1]])
    return [(start, end) for start, end in spans if text[start:end].strip()]
