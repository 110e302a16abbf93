"""Search engines behind one protocol."""

from leret.retrieval.base import Retriever

__all__ = ["Retriever"]
