"""The run directory, through which stages exchange data.

::

    R/run.yaml        resolved recipe of every stage, versions, digests; `schema` is the layout version
    R/prompts/        prompt bank
    R/rollouts.db     states and samples
    R/held_out.json   ids of questions excluded from training: the test split and duplicates of its questions
    R/preferences/    preference pairs for training
    R/policies/NAME/  trained policies
    R/program/        files for `leret.load`
    R/eval/           summary.json, TREC run files
    R/report.html
    R/events.jsonl    event log of all stages
    R/cache/          indexes and other files that leret can rebuild
    R/shards/         one store per shard, until merged into rollouts.db
    R/STAGE.done      marker of a completed stage (`leret.core.stages`)
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from leret.core import bundled as shipped
from leret.core import yaml
from leret.core.errors import LeretError, ProgramError, RunError
from leret.core.files import read_uri, write_atomically
from leret.core.stages import source_digest
from leret.core.types import digest

SCHEMA = 2  # version of the run directory's layout
_RUN, _LERET = "$RUN/", "$LERET/"  # path prefixes: run directory, leret

_PACKAGES = ("leret", "torch", "transformers", "trl", "dspy", "bm25s", "datasets")


@dataclass(frozen=True, slots=True)
class RunManifest:
    """Content of run.yaml with absolute paths. A section is None or empty until its stage has run."""

    # Python and the packages that affect results
    versions: Mapping[str, str | None] = field(default_factory=dict)
    machine: str | None = None  # processor, threads and GPU of the last `leret sample`
    # day on which the run began (YYYY-MM-DD): today's date for chat templates in all stages
    date: str | None = None
    # the resolved recipe of `leret sample`, as JSON values
    sampling: Mapping[str, Any] | None = None
    # by name: corpus, program, last sampling policy ...
    digests: Mapping[str, str] = field(default_factory=dict)
    # policy, model and digest per sampling round, oldest first
    rounds: Sequence[Mapping[str, Any]] = ()
    bank: Mapping[str, Any] | None = None  # names and scores of the bank's prompts
    # by predictor: True if a search follows the predictor
    searched: Mapping[str, bool] | None = None
    # strategy, margin and number of pairs
    preferences: Mapping[str, Any] = field(default_factory=dict)
    # by name of a trained policy: its key and counts
    training: Mapping[str, Any] = field(default_factory=dict)
    eval: Mapping[str, Any] | None = None  # the resolved recipe of the last `leret eval`
    optimize: Mapping[str, Any] | None = None  # digests from which `leret.LeReT` resumes

    @property
    def policy_digest(self) -> str | None:
        return self.digests.get("policy")


class Run:
    """A run directory. Attributes are paths of the files and directories in the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "run.yaml"
        self.prompts = path / "prompts"
        self.store = path / "rollouts.db"
        self.held_out = path / "held_out.json"
        self.shards = path / "shards"
        self.preferences = path / "preferences"
        self.policies = path / "policies"
        self.program = path / "program"
        self.eval = path / "eval"
        self.report = path / "report.html"
        self.cache = path / "cache"
        self.setup_lock = path / ".setup.lock"  # held while a process creates files for all shards
        # stamp and content of run.yaml when last read
        self._record: tuple[tuple[int, int, int], Any] | None = None
        # record and the manifest built from it
        self._manifest: tuple[Mapping[str, Any], RunManifest] | None = None

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open an existing run; RunError if it does not exist or has another layout version."""
        run = cls(path)
        if not run.manifest_path.is_file():
            raise RunError(
                f"{path} is not a run directory (no run.yaml); run `leret sample RECIPE --run {path}`"
            )
        run.record()
        return run

    @classmethod
    def create(cls, path: Path) -> Run:
        """Open a run, or create it in a missing or empty directory; RunError if the directory has other files."""
        run = cls(path)
        if run.manifest_path.is_file():
            return cls.open(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; choose a directory for the run")
        if path.is_dir() and any(not file.name.startswith(".") for file in path.iterdir()):
            raise RunError(
                f"{path} is not empty and is not a run; choose an empty or a new directory"
            )
        from filelock import FileLock  # imported late to keep commands that write nothing fast

        with run.writing():
            path.mkdir(parents=True, exist_ok=True)
            with FileLock(run.setup_lock):  # shards may start at the same time
                if not run.manifest_path.is_file():
                    run.update(versions=versions(), date=datetime.date.today().isoformat())
        return run

    @property
    def manifest(self) -> RunManifest:
        """Content of run.yaml, reread only after a change; raises the same RunError as `record`."""
        record = self.record()
        if self._manifest is None or self._manifest[0] is not record:
            sections = {
                n: _with_texts(record[n], "$", self._located)
                for n in record.keys() & RunManifest.__slots__
            }
            self._manifest = record, RunManifest(**sections)
        return self._manifest[1]

    def record(self) -> Mapping[str, Any]:
        """Return run.yaml with unresolved paths, relative to the run (``$RUN/../data``) or to leret (``$LERET/``).

        Relative paths let a run move together with its files. RunError if run.yaml is unreadable or of another version.
        """
        try:
            stamp = self._stamp()
            if self._record is None or self._record[0] != stamp:
                self._record = stamp, yaml.load(self.manifest_path.read_text(encoding="utf-8"))
            value: Any = self._record[1]
        except (OSError, ValueError, LeretError) as error:
            raise RunError(
                f"{self.manifest_path} cannot be read ({error}); restore it or start a new run"
            ) from error
        schema = value.get("schema") if isinstance(value, dict) else None
        if schema != SCHEMA:
            fault = f"{self.path} has run layout version {schema!r}, but this leret reads version {SCHEMA}"
            raise RunError(f"{fault}; use the leret version that wrote the run, or start a new run")
        sections: dict[str, Any] = value
        prepared = sections.get("prepared")
        if prepared and self.store.is_file():
            with closing(sqlite3.connect(read_uri(self.store), uri=True)) as database:
                [name] = database.execute("PRAGMA application_id").fetchone()
            if name == prepared["name"]:
                merged = {**sections, **prepared["sections"]}
                del merged["prepared"]
                return merged
        return sections

    def prepare(self, sections: Mapping[str, Any]) -> int:
        """Write sections that readers ignore until the store's ``application_id`` is set to the returned number."""
        name = secrets.randbits(30) + 1
        self.update(prepared={"name": name, "sections": sections})
        return name

    def update(self, *, keep: bool = False, **sections: Any) -> None:
        """Replace sections of run.yaml (``sampling``, ``digests`` ...); ``keep`` merges new keys into old sections."""
        from filelock import FileLock

        with self.writing(), FileLock(self.path / ".run.yaml.lock"):
            value: dict[str, Any] = (
                {**self.record()} if self.manifest_path.is_file() else {"schema": SCHEMA}
            )
            for name, section in _with_texts(sections, "/", self._shared).items():
                value[name] = {**(value.get(name) or {}), **section} if keep else section
            write_atomically(self.manifest_path, yaml.dump(value))
            copied = json.loads(json.dumps(value))  # what reading the file would give
            self._record = self._stamp(), copied

    def _stamp(self) -> tuple[int, int, int]:
        status = self.manifest_path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size  # changes with every write

    def sampling(self, made_by: str = "leret sample RECIPE") -> dict[str, Any]:
        """Return the sampling recipe in run.yaml. RunError if the command ``made_by`` has not run."""
        value = self.manifest.sampling
        if not value:
            raise RunError(
                f"{self.path} has no sampling yet; run `{made_by} --run {self.path}` first"
            )
        return dict(value)

    def event(self, stage: str, what: str, **values: Any) -> None:
        """Append ``{"time", "stage", "event", **values}`` to events.jsonl; ``time`` is in seconds since 1970 (UTC)."""
        line = json.dumps(
            {"time": round(time.time(), 3), "stage": stage, "event": what, **values},
            ensure_ascii=False,
        )
        with self.writing(), (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def trainings(self) -> dict[str, dict[str, Any]]:
        """Map each fully trained policy to its training.json; a policy comes after its parent."""
        notes = {}
        for path in sorted(self.policies.glob("[!.]*/training.json")):
            advice = f"delete {path.parent} and train again"
            notes[path.parent.name] = _read_json(path, advice)

        def depth(name: str) -> int:
            parent = notes[name].get("parent")
            return 1 + depth(parent) if parent in notes else 0

        return {name: notes[name] for name in sorted(notes, key=lambda name: (depth(name), name))}

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Map each evaluation to its summary.json, the main one (named "") first."""
        paths = {"": self.eval / "summary.json"}
        for path in sorted(self.eval.glob("*/summary.json")):
            paths[path.parent.name] = path
        summaries = {}
        for name, path in paths.items():
            if path.is_file():
                summaries[name] = _read_json(path, "delete it and run `leret eval` again")
        return summaries

    def _shared(self, text: str) -> str:
        if not os.path.exists(text.partition(":")[0]):
            return text
        ours = os.path.relpath(text, shipped.ROOT)
        if ours.partition("/")[0] in shipped.FOLDERS:
            return f"{_LERET}{ours}"
        return f"{_RUN}{os.path.relpath(text, self.path.resolve())}"

    def _located(self, text: str) -> str:
        for mark, place in ((_RUN, self.path.resolve()), (_LERET, shipped.ROOT)):
            if text.startswith(mark):
                return os.path.normpath(place / text.removeprefix(mark))
        return text

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert an OSError in the block to a RunError with advice. Files written before the error are kept."""
        try:
            yield
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            what = (
                "the disk is full; free some space"
                if full
                else f"{error}; choose a writable directory"
            )
            again = "and run the same command again to resume"
            raise RunError(f"{self.path} cannot be written: {what} {again}") from error


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); {advice}") from error


def versions() -> dict[str, str | None]:
    """Return versions of Python and of packages that affect results; None for a missing package."""
    return {"python": platform.python_version()} | {
        package: installed_version(package) for package in _PACKAGES
    }


def machine() -> str | None:
    """Name what rounds PyTorch's computations: processor, threads and GPU; None if it is not in use."""
    torch: Any = sys.modules.get("torch")  # a policy on a server needs no torch
    if torch is None:
        return None
    parts = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    parts.append(f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def program_digest(program: Mapping[str, Any]) -> str:
    """Return a digest of a program's source, arguments and adapter; ``program`` is the recipe section."""
    path, _, name = program["path"].rpartition(":")
    try:
        source = source_digest(Path(path))
    except OSError as error:
        raise ProgramError(f"{path} cannot be read ({error.strerror}); fix program.path") from error
    arguments = {key: value for key, value in program.items() if key not in {"path", "adapter"}}
    return digest(source, name, arguments, program["adapter"])


def _with_texts(value: Any, prefix: str, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to every string in ``value`` that starts with ``prefix``."""
    if isinstance(value, Mapping):
        return {key: _with_texts(item, prefix, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item, prefix, change) for item in value]
    return change(value) if isinstance(value, str) and value.startswith(prefix) else value


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
