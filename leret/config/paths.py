"""The files that a recipe names: where they are looked for, and what is said when they are not there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from leret.config.base import RecipePath, with_paths
from leret.config.sampling import SamplingRecipe
from leret.core import bundled as shipped
from leret.core.yaml import Key, Placed, dotted

M = TypeVar("M", bound=BaseModel)


def locate(recipe: M, placed: Placed, beside: Path, optional: Collection[str] = ()) -> tuple[M, list[str]]:
    """The recipe with absolute paths, and one line for each file that is missing.

    ``placed`` is the document that it came from, in the folder ``beside``; files of ``optional`` keys may be missing.
    """
    problems: list[str] = []
    folders = (Path.cwd(), beside, beside.parent, shipped.root())
    pretrained = isinstance(recipe, SamplingRecipe) and recipe.pretrain is not None

    def found(key: Key, given: str, mark: RecipePath) -> str:
        made_here = pretrained and key == ("policy", "model")
        if is_name(given, mark) and (not made_here or given in mark.names):
            return given
        for folder in folders if given else ():
            path = folder / Path(given).expanduser()
            if path.exists():
                return str(path.resolve())
        if mark.may_be_missing or dotted(key) in optional:
            return str(Path(given).absolute())
        mend = "`leret pretrain` this recipe first, or correct the path" if made_here else mark.mend
        problems.append(f"{placed.at(key)}{dotted(key)}: no {mark.what} {given!r} here or beside the recipe; {mend}")
        return given

    return with_paths(recipe, found), problems


def is_name(given: str, mark: RecipePath) -> bool:
    """Whether a value is a name and no path: ``demo``, ``hf:NAME``, or ``owner/name`` where no such folder is here."""
    if given in mark.names or given.startswith("hf:"):
        return True
    owner, _, name = given.partition("/")
    return (
        mark.hub and bool(name) and "/" not in name and owner not in {"", ".", "..", "~"} and not Path(owner).exists()
    )
