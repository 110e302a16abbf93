"""Skip completed work and resume unfinished work, in stages and index builds. A stage has this form::

    def stage(recipe, run) -> Report:
        key = stage_key(recipe, input_stamps(recipe.data.corpus, run.store))
        before = completed(run.path, "sample", key)       # before the stage opens a model, a corpus or an index
        if before is not None:
            return Report(**before, already=True)
        check_resumable(run.path, manifest_section, recipe, free_keys(type(recipe)))
        ...                                               # do the work that is not in the store or the checkpoint
        mark_completed(run.path, "sample", key, asdict(report), [run.store])
        return report

`stage_key` covers every key of the recipe, and each input file's name, size and modification time. `completed`
compares the key and the sizes of result files with the mark in ``DIR/STAGE.done``. `check_resumable` compares content
digests that the stage adds to the recipe (``{**recipe, "digest": {"corpus": ...}}``), and all keys except `free_keys`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from leret.core.errors import RunError
from leret.core.files import write_atomically
from leret.core.types import Json, digest

if TYPE_CHECKING:
    from pydantic import BaseModel


_LERET = Path(__file__).resolve().parents[1]
_read: dict[Path, bytes] = {}  # contents of modules at the last call of `forget_changed`


def source_files(file: Path) -> list[Path]:
    """List a Python file and all modules in its directory or package that it imports, directly or indirectly.

    Imports are parsed, not executed, so computed module names are missing. Installed packages and leret are excluded.
    """
    first = file.resolve()
    top = first.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    files = dict[Path, None]()
    todo = [first]
    while todo:
        path = todo.pop()
        installed = path.is_relative_to(_LERET) or {"site-packages", "dist-packages"}.intersection(
            path.parts
        )
        if path not in files and path.suffix == ".py" and (path == first or not installed):
            files[path] = None
            todo += _imports(path, {first.parent, top})
    return [file, *sorted(files.keys() - {first})]


def source_digest(file: Path) -> str:
    """Return a digest of `source_files`; OSError if a file cannot be read."""
    files = {
        os.path.relpath(path.resolve(), file.resolve().parent): path for path in source_files(file)
    }
    names = {
        name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for name, path in files.items()
    }
    return digest(names) if len(names) > 1 else names[file.resolve().name]


def forget_changed(file: Path) -> None:
    """Make the next import reload all modules of `source_files` if any has changed since the last call."""
    now = {path.resolve(): path.read_bytes() for path in source_files(file)}
    if any(_read.get(path, content) != content for path, content in now.items()):
        for name, module in list(sys.modules.items()):
            origin = getattr(module, "__file__", None)
            if origin and Path(origin).resolve() in now:
                del sys.modules[name]
    _read.update(now)


FILE_MODULE = "leret_file_"
"""Beginning of the names of modules from `run_file`."""


def run_file(file: Path) -> ModuleType:
    """Run a Python file as a module, unless neither it nor its imports changed.

    OSError if the file cannot be read; ImportError if it is not a Python file; else what its code raises.
    """
    forget_changed(file)
    name = f"{FILE_MODULE}{digest(str(file.resolve()), source_digest(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError("it is not a Python file; name a file that ends in .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _imports(path: Path, roots: Collection[Path]) -> Iterator[Path]:
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                level = getattr(node, "level", 0)
                folders = path.parents[level - 1 : level] if level else roots
                for alias, folder in product(node.names, folders):
                    dotted = ".".join(filter(None, (module, alias.name)))
                    yield from _module_files(folder, dotted.split("."))


def _module_files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files that an import of ``a.b.c`` runs: those of ``a``, ``a.b`` and ``a.b.c``."""
    base = folder
    for part in parts:
        base = base / part
        for file in (Path(f"{base}.py"), base / "__init__.py"):
            if file.is_file():
                yield file


def input_stamps(*paths: str | Path | None) -> list[list[tuple[str, int, int]]]:
    """Return name, size and modification time (ns) of each file. Directories are searched recursively.

    Files with equal stamps count as identical. A missing path has an empty list of stamps; a path of None has no list.
    """
    return [_stamps(Path(path)) for path in paths if path]


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    stamps = []
    for file in _files(path):
        stat = file.stat()
        stamps.append((file.name, stat.st_size, stat.st_mtime_ns))
    return stamps


def stage_key(recipe: BaseModel | Json, *inputs: Json) -> str:
    """Return the key of a stage's result: a digest of the recipe and the digests or stamps of its inputs."""
    return digest(
        recipe if isinstance(recipe, dict | list | str) else recipe.model_dump(mode="json"), inputs
    )


def completed(directory: Path, stage: str, key: str) -> dict[str, Any] | None:
    """Return a stage's report; None if the stage is not completed, or its key or a result file's size has changed."""
    try:
        mark = json.loads((directory / f"{stage}.done").read_text(encoding="utf-8"))
        same = all(
            (directory / name).stat().st_size == size for name, size in mark["files"].items()
        )
        return dict(mark["report"]) if same and mark["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no mark, or a damaged mark: the stage itself finds the remaining work


def inputs_unchanged(directory: Path, stage: str) -> bool:
    """Check whether a completed stage's input files still match the stamps in its mark; False if it has no stamps."""
    try:
        inputs = json.loads((directory / f"{stage}.done").read_text(encoding="utf-8"))["inputs"]
        return bool(
            digest(input_stamps(*(directory / name for name in inputs)))
            == digest(list(inputs.values()))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def mark_completed(
    directory: Path,
    stage: str,
    key: str,
    report: Mapping[str, Json],
    files: Iterable[Path] = (),
    inputs: Mapping[Path, Json] | None = None,
) -> None:
    """Mark a stage as completed. ``files`` are its results (files or directories). ``directory`` may be moved later.

    ``inputs`` are stamps of input files, by path, for `inputs_unchanged`.
    """
    sizes = {}
    for path in files:
        for file in _files(path):
            sizes[os.path.relpath(file, directory)] = file.stat().st_size
    mark: dict[str, Any] = {"key": key, "report": dict(report), "files": sizes}
    if inputs is not None:
        mark["inputs"] = {
            os.path.relpath(path, directory): stamps for path, stamps in inputs.items()
        }
    write_atomically(directory / f"{stage}.done", json.dumps(mark, indent=1, ensure_ascii=False))


def check_resumable(
    where: object,
    old: BaseModel | Mapping[str, Any],
    new: BaseModel | Mapping[str, Any],
    free: Collection[str] = (),
    otherwise: str = "name a new run directory",
) -> None:
    """Refuse to resume work that was started with a different recipe. The RunError lists every key that differs.

    Keys in ``free`` (without list indices, as in ``engines.model``; ``*`` is a wildcard) and their subkeys may differ.
    ``otherwise`` ends the message "use the same values, or ...".
    """
    before, now = dict(flat(old)), dict(flat(new))
    changed = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) == now.get(key) or _is_free(key, free):
            continue
        if key.startswith("digest."):
            name = key.removeprefix("digest.")
            changed.append(f"  {name}: its content has changed since then")
        else:
            values = f"{before.get(key)!r} in the run, {now.get(key)!r} in the recipe"
            changed.append(f"  {key}: {values}")
    if changed:
        listed = "\n".join(changed)
        raise RunError(
            f"{where} was started with a different recipe:\n{listed}\nuse the same values, or {otherwise}"
        )


def _files(path: Path) -> list[Path]:
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in paths if file.is_file()]


def _is_free(key: str, free: Collection[str]) -> bool:
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    return any(
        fnmatchcase(plain, pattern) or fnmatchcase(plain, f"{pattern}.*") for pattern in free
    )


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Json]]:
    """Yield leaves by dotted key. Sections in a list are numbered; None and {} count as absent."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name))
    elif value not in ({}, None):
        yield key, list(value) if isinstance(value, tuple) else value
