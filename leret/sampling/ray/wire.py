"""What the driver of a cluster and its workers send each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.types import Task
from leret.sampling.store.merge import Rows
from leret.sampling.store.schema import STORE_SCHEMA

if TYPE_CHECKING:
    from leret.core.usage import UsageByPrompt
    from leret.programs.prompts import Prompt
    from leret.sampling.rollouts.scheduler import SamplingStats


TOKEN = "token"
"""File of the run's workers directory by which a worker knows that it sees the same directory."""


def version() -> tuple[str, int]:
    """What must be the same on both sides."""
    import leret

    return leret.__version__, STORE_SCHEMA


@dataclass(frozen=True)
class Job:
    """What all workers of a run do.

    Attributes:
        version: of the driver's leret.
        recipe: resolved; its paths must lead to the same files on every machine.
        run: the run's directory, which need not be visible.
        token: content of the token file in it.
        digests: of corpus, retriever, program and policy, as the driver sees them.
    """

    version: tuple[str, int]
    recipe: dict[str, Any]
    run: Path
    token: str
    prompts: tuple[Prompt, ...]
    digests: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """Questions that one worker takes together.

    Attributes:
        known: what the run has of them already: of an earlier command, or of a worker that died.
    """

    number: int
    questions: tuple[Task, ...]
    known: Rows = field(default_factory=Rows)


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        stores: how the names of its stores begin, where the driver can see them too; None where they are on a disk of
            the worker's machine alone.
    """

    host: str
    pid: int
    stores: Path | None

    def files(self) -> list[Path]:
        """Its stores that are there: of shards that have not ended, or whose end the driver has not taken in."""
        return [] if self.stores is None else sorted(self.stores.parent.glob(f"{self.stores.name}*.db"))


@dataclass(frozen=True)
class Ended:
    """A shard that was worked through, outages included."""

    number: int
    tally: SamplingStats
    ledger: UsageByPrompt


@dataclass(frozen=True)
class Batch:
    """What a worker has to tell since it was last asked, in the order of its commits.

    Attributes:
        searches: asked and searched since the worker began.
    """

    rows: Rows
    ended: tuple[Ended, ...]
    searches: Mapping[str, int] = field(default_factory=dict)
