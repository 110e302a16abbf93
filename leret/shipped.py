"""The recipes and programs that come with leret, wherever it is installed.

In a checkout they are the top folders; in a wheel they lie under ``leret/_recipes``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from leret.errors import ConfigError

__all__ = ["FOLDERS", "copy", "find", "names", "purpose", "root"]

FOLDERS = ("sampling", "training", "eval", "pipelines")
"""Folders of recipes and programs."""


def root() -> Path:
    """The directory that holds `FOLDERS`."""
    package = Path(__file__).resolve().parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent


def names() -> list[str]:
    """Every recipe and program, as ``sampling/demo.yaml``; recipes first."""
    found: list[str] = []
    for folder in FOLDERS:
        suffix = ".py" if folder == "pipelines" else ".yaml"
        found += sorted(str(path.relative_to(root()).as_posix()) for path in (root() / folder).glob(f"*{suffix}"))
    return found


def find(name: str, folder: str | None = None) -> Path | None:
    """The shipped file of a name: ``sampling/demo.yaml``, ``sampling/demo``, or ``demo`` within ``folder``."""
    wanted = {name, f"{name}.yaml", f"{name}.py"}
    wanted |= {f"{folder}/{n}" for n in wanted} if folder else set()
    fits = [known for known in names() if known in wanted]
    return root() / fits[0] if len(fits) == 1 else None


def copy(name: str, directory: Path) -> list[Path]:
    """Copy a recipe in its folder, and the programs beside it, to be edited.

    Args:
        name: as in `names`; the suffix may be left out.
        directory: gets ``sampling/demo.yaml`` and ``pipelines/*.py``. Files that exist are kept.

    Returns:
        What was written; nothing where all of it existed.

    Raises:
        ConfigError: no such recipe, or the directory cannot be written.
    """
    source = find(name)
    if source is None:
        raise ConfigError(f"{name}: not a shipped recipe; there are {', '.join(names())}")
    programs = sorted((root() / "pipelines").glob("*.py")) if source.parent.name == "sampling" else []
    written: list[Path] = []
    for path in (source, *programs):
        target = directory / path.relative_to(root())
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written ({error.strerror}); name another directory") from error
        written.append(target)
    return written


def purpose(name: str) -> str:
    """The first sentence of a shipped file's header."""
    text = (root() / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        return text.split('"""')[1].split("\n")[0].strip() if '"""' in text else ""
    lines = [line.lstrip("# ").rstrip() for line in text.split("\n") if line.startswith("#")]
    words = " ".join(lines).partition("Purpose:")[2].partition("Prerequisites:")[0]
    return words.strip().split(". ")[0].rstrip(".")
