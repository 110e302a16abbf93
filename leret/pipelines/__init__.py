"""DSPy programs: loading them, watching them, saving them."""

from leret.pipelines.search import Found, Search

__all__ = ["Found", "Search"]
