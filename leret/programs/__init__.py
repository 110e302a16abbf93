"""DSPy programs: loading them, watching them, saving them."""

from leret.programs.search import Found, Search

__all__ = ["Found", "Search"]
