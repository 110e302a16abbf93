"""Decompress pages, and extract their titles and main texts."""

from __future__ import annotations

import zlib
from typing import Any

from leret.core.errors import import_optional, reason

TEXT = "text/plain"

Body = tuple[bytes, str, str | None]  # content, type, charset


class PageError(Exception):
    """A page without text.

    If ``wait_s`` is not 0, `fetch` tries again; if ``transient``, the next `fetch` does.
    """

    def __init__(
        self, kind: str, why: str, *, transient: bool = False, status: int = 0, wait_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.kind = kind
        self.transient = transient
        self.status = status
        self.wait_s = wait_s


class Unzip:
    """Decompresses zlib, or one or more gzip members. Ignores other bytes after the end."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib

    @property
    def is_complete(self) -> bool:
        return self._member.eof

    def decompress(self, chunk: bytes, limit: int) -> bytes:
        """Return at most ``limit`` bytes."""
        content = self._member.decompress(chunk, limit)
        while len(content) < limit:
            rest = self._member.unused_data.lstrip(b"\0")
            if not rest.startswith(b"\x1f\x8b"):
                break
            self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)
            content += self._member.decompress(rest, limit - len(content))
        return content


def main_text(content: bytes, kind: str, charset: str | None) -> tuple[str, str]:
    """Return the title and the main text of a page. PageError if it has no text."""
    if (charset or "").lower() in {"punycode", "idna"}:  # decoding them takes quadratic time
        charset = None
    try:
        text = content.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):  # a charset that Python does not know
        return main_text(content, kind, None)
    title = ""
    if kind != TEXT:
        trafilatura = import_optional("trafilatura", "trafilatura", "fetch")
        source = text if charset else content
        try:
            page: Any = trafilatura.bare_extraction(
                source, include_comments=False, with_metadata=True
            )
        except Exception as error:
            raise PageError("text", f"cannot be parsed ({reason(error)})") from error
        title = getattr(page, "title", None) or ""
        text = getattr(page, "text", None) or ""
    if not text.strip():
        raise PageError("text", "no main text")
    return title, text
