"""The engines of a recipe that have no index of their own: they ask a server."""

from __future__ import annotations

from leret.config import RetrieverSettings
from leret.liveconfig import ClinicalTrialsSettings, PubMedSettings
from leret.retrieval.base import Retriever
from leret.retrieval.documents import Documents

__all__ = ["is_live", "load_live"]


def is_live(kind: str) -> bool:
    """Does an engine ask a server?"""
    return kind in {"remote", "pubmed", "clinicaltrials"}


def load_live(settings: RetrieverSettings, corpus: Documents | None) -> Retriever:
    """The engine that a recipe names; nothing is asked yet.

    Args:
        settings: whose kind is live.
        corpus: what a remote engine should search; None checks nothing.

    Raises:
        ConfigError: a URL is none, or an environment variable is not set.
    """
    if settings.remote is not None:
        from leret.retrieval.remote import Remote

        return Remote(settings.remote, corpus)
    if settings.kind == "pubmed":
        from leret.retrieval.pubmed import PubMed

        return PubMed(settings.pubmed or PubMedSettings())
    from leret.retrieval.clinicaltrials import ClinicalTrials

    return ClinicalTrials(settings.clinicaltrials or ClinicalTrialsSettings())
