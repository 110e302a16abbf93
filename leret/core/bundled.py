"""The recipes and programs that come with leret, wherever it is installed.

In a checkout they are the top folders; in a wheel they lie under ``leret/_recipes``.
"""

from __future__ import annotations

import hashlib
import shutil
from difflib import get_close_matches
from pathlib import Path

from leret.core.errors import ConfigError, PolicyError, RetrievalError, reason

FOLDERS = ("sampling", "training", "eval", "pipelines")
"""Folders of recipes and programs."""


def root() -> Path:
    """The directory that holds `FOLDERS`."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent


def names() -> list[str]:
    """Every recipe and program, as ``sampling/demo.yaml``; recipes first."""
    found: list[str] = []
    for folder in FOLDERS:
        suffix = ".py" if folder == "pipelines" else ".yaml"
        found += sorted(str(path.relative_to(root()).as_posix()) for path in (root() / folder).glob(f"*{suffix}"))
    return found


def find(name: str, *folders: str) -> Path:
    """The shipped file of a name: ``sampling/demo.yaml``, or ``demo`` in the first of ``folders`` that has one."""
    known = names()
    for folder in ("", *folders):
        for suffix in ("", ".yaml", ".py"):
            if Path(folder, f"{name}{suffix}").as_posix() in known:
                return root() / folder / f"{name}{suffix}"
    stems = {Path(other).stem: other for other in known if not folders or other.startswith(folders)}
    near = [f"; did you mean {stems[stem]}?" for stem in get_close_matches(Path(name).stem, stems, 1)]
    raise ConfigError("".join([f"{name}: no such recipe; name a file, or one of `leret recipes list`", *near]))


def copy(name: str, directory: Path) -> list[Path]:
    """Copy a recipe in its folder, and the programs beside it, to be edited.

    The suffix of ``name`` may be left out. Files that exist are kept; returns what was written.
    """
    source = find(name, *FOLDERS)
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


POLICIES = {"demo": "policy", "agent": "agent"}
"""The small policies that come with leret: name, and folder under ``leret/demo``."""


def policy_directory(name: str | Path) -> Path | None:
    """The directory of a policy that comes with leret; None where none is named so."""
    if not isinstance(name, str) or name not in POLICIES:
        return None
    path = Path(__file__).resolve().parents[1] / "demo" / POLICIES[name]
    if not (path / "config.json").is_file():
        raise PolicyError(f"policy {name} is not in {path}; install leret again, or rebuild it with `leret pretrain`")
    return path


_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model", ".metadata"}
"""Endings of the files that decide what a model answers."""
_ASIDE = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot"]
"""The same weights in other forms."""


def find_model(name: str, key: str) -> Path:
    """The directory of a model: ``name``, or ``owner/name`` of the Hugging Face hub, downloaded where it is not yet.

    ``key`` is that of the recipe, for the message.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise RetrievalError(f"{key}: no model directory {name}; correct the path, or name a model of the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=_ASIDE))
    except Exception as error:
        raise RetrievalError(
            f"{key}: no directory {name} here, and the hub does not give it ({reason(error)}); "
            "download the model and name its directory"
        ) from error


def model_digest(directory: Path) -> str:
    """A name for the content of a model directory: of all its weights, settings and vocabulary files."""
    content = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix not in _WEIGHTS or not path.is_file() or name.startswith((".", "onnx/", "openvino/")):
            continue
        with open(path, "rb") as file:
            one = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        content.update(f"{name}\0{one.hexdigest()}\0".encode())
    return content.hexdigest()


def require_model(directory: Path, digest: str, index: Path) -> None:
    """Refuse a model that is not the one an index was made with."""
    if not directory.is_dir():
        raise RetrievalError(f"{index}: its model {directory} is gone; put it back, or build with another")
    if model_digest(directory) != digest:
        raise RetrievalError(
            f"{index}: {directory} is not the model that the index was made with; put that back, or build it again"
        )
