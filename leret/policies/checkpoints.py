"""Models on disk: lookup by name, checks, digests and tokenizers. Safetensors only."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from leret.config.policy import FeaturesSettings, PickerSettings, PolicySettings
from leret.core import bundled
from leret.core.bundled import MINILM, POLICIES, SHIPPED, minilm_directory, policy_path
from leret.core.classes import source_digest
from leret.core.errors import MissingDependency, PolicyError, reason
from leret.core.files import file_digest
from leret.core.runs import Run
from leret.core.types import digest

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_INDEX = "model.safetensors.index.json"
_NAMED_FILES = (
    "config.json",
    _INDEX,
    "generation_config.json",
    "adapter_config.json",
    "picker.json",
    "tinker.json",
    "chat_template.jinja",
)
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)
_PLAIN = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if loop.last and message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""Chat template for base models: one message per line, and the end token after the answer."""

PICKER_RECORD = "picker.json"
"""Name of the file with a picker's kind and settings, in the picker's directory."""

PICKER_VERSION = 3

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

_digests: dict[tuple[str, int, int], bytes] = {}


def policy_directory(name: str | Path) -> Path | None:
    """Return the directory of a policy in `POLICIES`; None for other names."""
    if not isinstance(name, str) or name not in POLICIES:
        return None
    return SHIPPED.get(name) or policy_path(name)


def find_model(name: str | Path) -> Path:
    """Return a model's directory from a path, hub repository, shipped policy, or `MINILM`."""
    path = minilm_directory() if name == MINILM else policy_directory(name) or Path(name)
    if not path.is_dir():
        path = _from_hub(str(name))
    is_adapter = (path / "adapter_config.json").is_file()
    if not (path / "config.json").is_file() and not is_adapter:
        raise PolicyError(
            f"{path} is not a model directory: it has neither config.json nor adapter_config.json; "
            "give a directory that save_pretrained wrote"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
        only = f" (only {', '.join(pickled[:3])}, which leret does not unpickle)" if pickled else ""
        raise PolicyError(
            f"{path} has no *.safetensors{only}; save it with "
            "save_pretrained(safe_serialization=True)"
        )
    _check_whole(weights)
    if is_adapter and path / "adapter_model.safetensors" not in weights:
        raise PolicyError(
            f"{path}: adapter_model.safetensors is missing; save the adapter again as safetensors"
        )
    refuse_changed_weights(path)
    return path


def sampled_settings(run: Run, predictors: Collection[str] | None = None) -> Mapping[str, Any]:
    """Return the settings of the policy that sampled a run.

    With ``predictors``, of the policy that they share.
    """
    section = run.sampling()
    first = section.get("policy", {})
    by_name = section.get("policies", {})
    settings = [by_name.get(name, first) for name in predictors or ()] or [first]
    if any(policy_settings != settings[0] for policy_settings in settings):
        names = ", ".join(predictors or ())
        fault = f"{names} have different policies in {run.path}"
        raise PolicyError(f"predictors: {fault}; train one predictor at a time")
    return dict(settings[0])


def sampled_model(run: Run, predictors: Collection[str] | None = None) -> str:
    """Return the model of a run's samples: a shipped policy, directory, or hub repository."""
    sampled = sampled_settings(run, predictors)
    model = str(sampled.get("model", ""))
    if model in POLICIES or Path(model).is_dir():
        return model
    kind = PolicySettings.find(str(sampled.get("kind")))
    if kind is not None and issubclass(kind.settings, PickerSettings):
        raise PolicyError(
            f"{run.path} was sampled with a picker; train it with algorithm: pqn or pick"
        )
    if sampled.get("kind") != "local":
        raise PolicyError(
            f"{run.path} was sampled from {model!r} on a server, so the run does not record where "
            "its weights are; replace `base` by the directory of the weights (or by `demo` or "
            "`agent`, if the server ran that policy)"
        )
    if not HUB_NAME.fullmatch(model):
        raise PolicyError(
            f"sampled policy {model} does not exist; replace `base` by the directory of its weights"
        )
    return model


def _from_hub(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise PolicyError(
            f"model directory {name} does not exist; give a directory, or a Hugging Face owner/name"
        )
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        HTTPError,
        OSError,
    ) as error:
        raise PolicyError(
            f"{name} is not a directory, and cannot be downloaded from the Hugging Face hub "
            f"({reason(error)}); download it first, or fix the name"
        ) from error


def _check_whole(weights: list[Path]) -> None:
    """Raise PolicyError for damaged or truncated files."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency("torch", "train") from error

    for file in weights:
        try:
            with safe_open(str(file), framework="np"):  # torch takes seconds to import
                pass
        except (SafetensorError, OSError) as error:
            raise PolicyError(
                f"{file} is damaged or truncated ({error}); copy or save it again"
            ) from error


def count_parameters(path: Path) -> int:
    """Count a model's parameters from its file headers.

    The count of an adapter includes its base.
    """
    from safetensors import safe_open

    base = adapter_base(path)
    total = 0 if base is None else count_parameters(base)
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118
                total += math.prod(weights.get_slice(name).get_shape())
    return total


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model directory.

    Raise `PolicyError` if it is missing or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"cannot read {path} ({error}); save the model again") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{path} is not a JSON object; save the model again")
    return value


def model_digest(path: Path) -> str:
    """Return a digest of a model's weights, configuration and tokenizer files.

    For an adapter, also of its base.

    Each file is read once per process, and again if its size or modification time changes.
    """
    total = hashlib.blake2b(digest_size=16)
    files: set[Path] = set()
    for pattern in ("*.safetensors", *_NAMED_FILES, *_TOKENIZER_FILES):
        files.update(path.glob(pattern))
    for file in sorted(files):
        if file.is_file():
            total.update(file.name.encode() + b"\0" + _file_digest(file))
    base = adapter_base(path)
    if base is not None:
        total.update(model_digest(base).encode())
    return total.hexdigest()


def policy_digest(path: Path) -> str:
    """Return a trained policy's `model_digest`.

    If subdirectories hold weights, a digest of all directories.
    """
    parts = sorted({path, *(file.parent for file in path.rglob("*.safetensors"))})
    names = {part.relative_to(path).as_posix(): model_digest(part) for part in parts}
    return digest(names) if len(names) > 1 else names["."]


def refuse_changed_weights(path: Path) -> None:
    """Raise PolicyError if a policy's files differ from the digest that training recorded."""
    record = path / "training.json"
    written = read_model_json(record).get("weights") if record.is_file() else None
    if written and written != policy_digest(path):
        raise PolicyError(
            f"weights, settings or tokenizer files of {path} or of its base have changed since "
            "training (their digest differs from training.json); restore the files, or train the "
            "policy again"
        )


def check_finite(model: Any, path: Path) -> None:
    """Raise `PolicyError` with the first bad tensor's name if weights are NaN or infinite."""
    for name, weight in model.named_parameters():
        is_wide_float = weight.is_floating_point() and weight.itemsize > 1
        if not is_wide_float or not weight.numel() or weight.is_meta:
            continue
        if not all(end.isfinite() for end in weight.detach().aminmax()):
            fault = f"{name} has NaN or infinite weights"
            raise PolicyError(f"{path}: {fault}; restore the files, or train it again")


def _file_digest(file: Path) -> bytes:
    status = file.stat()
    key = (str(file.resolve()), status.st_mtime_ns, status.st_size)
    if key not in _digests:
        _digests[key] = file_digest(file)
    return _digests[key]


def adapter_base(path: Path) -> Path | None:
    """Return the directory of an adapter's base model; None if ``path`` holds full weights."""
    config = path / "adapter_config.json"
    if not config.is_file():
        return None
    name = read_model_json(config).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise PolicyError(
            f"{config} does not set base_model_name_or_path; set it, or save the adapter again"
        )
    beside = path / name
    return find_model(beside if beside.is_dir() else name)


def pick_device(device: str) -> str:
    """Return the device, with ``auto`` resolved to cuda or cpu.

    Raise `PolicyError` if it is not available.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(
            f"device: {device} is not available ({reason(error)}); use auto or cpu"
        ) from error
    return device


def positions(model: Any) -> int | None:
    """Return a model's maximum sequence length in tokens.

    None if its configuration has no limit.
    """
    n = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return n if isinstance(n, int) and n > 0 else None


def load_tokenizer(path: Path, template: str | None = None) -> Any:
    """Load a model's tokenizer (or that of an adapter's base).

    Raise `PolicyError` if it has no chat template.

    ``template="plain"`` sets a chat template of leret, and raises `PolicyError` if the tokenizer
    has a different one. leret's template never changes, so a digest of the model's files still
    identifies the policy.
    """
    from transformers import AutoTokenizer

    source = path
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        source = adapter_base(path) or path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise PolicyError(
            f"cannot load the tokenizer of {source} ({reason(error)}); save it there with "
            "tokenizer.save_pretrained"
        ) from error
    if template == "plain" and tokenizer.chat_template not in {None, _PLAIN}:
        raise PolicyError(
            "policy.template: plain is for models without a chat template, but the tokenizer of "
            f"{source} has a chat template; remove policy.template"
        )
    if template == "plain":
        tokenizer.chat_template = _PLAIN
    if not tokenizer.chat_template:
        raise PolicyError(
            f"the tokenizer of {source} has no chat template; set policy.template: plain for a "
            "base model, or set tokenizer.chat_template and save the tokenizer"
        )
    return tokenizer


def read_picker(settings: PickerSettings) -> tuple[PickerSettings, dict[str, Any] | None]:
    """Return ``settings`` with a saved picker's architecture, and the record in ``picker.json``.

    For a pretrained encoder or a picker from scratch, the settings are unchanged and the record is
    None.
    """
    directory = Path(settings.model)
    if not (directory / PICKER_RECORD).is_file():
        if isinstance(settings, FeaturesSettings) and settings.model != "scratch":
            raise PolicyError(
                f"policy.model: {directory} has no picker of kind features; set policy.model to a "
                "directory that `leret train` wrote, or remove policy.model to start from scratch"
            )
        return settings, None
    record = read_model_json(directory / PICKER_RECORD)
    if record.get("version") != PICKER_VERSION:
        raise PolicyError(
            f"{directory} is from a different version of leret; train the picker again"
        )
    if record.get("kind") != settings.kind:
        raise PolicyError(
            f"{directory} has a picker of kind {record.get('kind')}; set policy.kind to this kind"
        )
    refuse_changed_weights(directory)
    saved = type(settings).model_validate({**settings.model_dump(), **record["settings"]})
    if (
        isinstance(saved, FeaturesSettings)
        and isinstance(settings, FeaturesSettings)
        and ":" in saved.features
    ):
        if ":" not in settings.features:
            raise PolicyError(
                f"{directory} was trained with the code {saved.features}, which runs only if the "
                f"recipe names it; read it, and set policy.features: {saved.features}"
            )
        saved = saved.model_copy(update={"features": settings.features})
    return saved, record


def picker_digest(settings: PickerSettings) -> str:
    """Return a digest of a picker's weights, architecture, decoding settings and features."""
    model = settings.model
    settings, record = read_picker(settings)
    content = None
    if model != "scratch":
        directory = Path(model) if record else find_model(model)
        content = bundled.model_digest(directory)
    source = None
    if isinstance(settings, FeaturesSettings):
        source = source_digest(settings.features)
    decoding = [settings.top_k, settings.beam, settings.budget]
    return digest(settings.kind, settings.architecture(), decoding, source, content)
