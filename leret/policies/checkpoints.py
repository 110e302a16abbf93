"""Models on disk: resolution of names, checks, digests and tokenizers. Safetensors only."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from leret.config.policy import FeaturesSettings, PickerSettings, PolicySettings
from leret.core import bundled
from leret.core.bundled import POLICIES
from leret.core.errors import MissingDependency, PolicyError, reason
from leret.core.runs import Run
from leret.core.types import digest
from leret.rewards.functions import source_digest

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_INDEX = "model.safetensors.index.json"
_NAMED_FILES = (
    "config.json", _INDEX, "generation_config.json", "adapter_config.json", "picker.json", "chat_template.jinja",
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_PLAIN = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if loop.last and message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""Template for models without turns: the messages' texts by lines, the answer with the end token."""

PICKER_RECORD = "picker.json"
"""In a picker's directory: its kind and settings."""

PICKER_VERSION = 3
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

_LOG = logging.getLogger("leret")
_digests: dict[tuple[str, int, int], bytes] = {}


def policy_directory(name: str | Path) -> Path | None:
    """Return the directory of a shipped policy; None for any other name."""
    if not isinstance(name, str) or name not in POLICIES:
        return None
    path = Path(__file__).resolve().parents[1] / "demo" / POLICIES[name]
    if not (path / "config.json").is_file():
        raise PolicyError(f"policy {name} is not in {path}; install leret again, or rebuild it with `leret pretrain`")
    return path


def find_model(name: str | Path) -> Path:
    """Return the directory of a model, given its path, its Hugging Face repository, or the name of a shipped one."""
    path = policy_directory(name) or Path(name)
    if not path.is_dir():
        path = _from_hub(str(name))
    if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        raise PolicyError(
            f"{path} holds neither config.json nor adapter_config.json: it is not a model directory; "
            "give the directory that save_pretrained wrote"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        others = f" (only {', '.join(pickled[:3])}, which leret does not unpickle)" if pickled else ""
        raise PolicyError(f"{path} has no *.safetensors{others}; save it with save_pretrained(safe_serialization=True)")
    _check_whole(weights)
    pickled = sorted(file.name for file in path.glob("*.bin") if file.name != "training_args.bin")
    if (path / "adapter_config.json").is_file() and (pickled or path / "adapter_model.safetensors" not in weights):
        raise PolicyError(
            f"{path}: an adapter is adapter_model.safetensors, without pickled weights beside it "
            f"({', '.join(pickled[:3]) or 'it is missing'}); save it again as safetensors"
        )
    refuse_changed_weights(path)
    if (path / "state.safetensors").is_file():  # until the last step of `leret pretrain`
        _LOG.warning("%s is unfinished: its pretraining was stopped; `leret pretrain` continues it", path)
    return path


def sampled_settings(run: Run, predictors: Collection[str] | None = None) -> Mapping[str, Any]:
    """Return the policy section of a run's sampling recipe: that of some predictors, or ``policy`` itself."""
    section = run.section("sampling", "leret sample RECIPE")
    by_name, first = section.get("policies", {}), section.get("policy", {})
    settings = [by_name.get(name, first) for name in predictors or ()] or [first]
    if any(one != settings[0] for one in settings):
        names = ", ".join(predictors or ())
        raise PolicyError(f"predictors: {names} have different policies in {run.path}; train them one by one")
    return dict(settings[0])


def sampled_model(run: Run, predictors: Collection[str] | None = None) -> str:
    """Return the weights that a run was sampled from: a shipped policy, a directory, or a hub repository."""
    sampled = sampled_settings(run, predictors)
    model = str(sampled.get("model", ""))
    if model in POLICIES or Path(model).is_dir():
        return model
    kind = PolicySettings.table.get(str(sampled.get("kind")))
    if kind is not None and issubclass(kind.settings, PickerSettings):
        raise PolicyError(f"{run.path} was sampled with a picker, which only algorithm: pqn and pick train")
    if sampled.get("kind") != "local":
        raise PolicyError(
            f"{run.path} was sampled from {model!r} on a server, and the run does not know where its weights are; "
            "give their directory instead of `base`, or demo or agent where that is the policy that was served"
        )
    if not HUB_NAME.fullmatch(model):
        raise PolicyError(f"the sampled policy {model} is gone; give a directory of its weights instead of `base`")
    return model


def _from_hub(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise PolicyError(f"there is no model directory {name}; give one, or owner/name of the Hugging Face hub")
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise PolicyError(
            f"{name} is not a directory, and the Hugging Face hub did not send it ({reason(error)}); "
            "download it first, or correct the name"
        ) from error


def _check_whole(weights: list[Path]) -> None:
    """Refuse files whose header or bytes are cut short."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency("torch", "train") from error

    for file in weights:
        try:
            with safe_open(str(file), framework="np"):  # torch takes seconds to import
                pass
        except (SafetensorError, OSError) as error:
            raise PolicyError(f"{file} is damaged or cut short ({error}); copy or save it again") from error


def count_parameters(path: Path) -> int:
    """Return the number of a model's weights, an adapter's base included, from the headers of its files."""
    from safetensors import safe_open

    base, total = adapter_base(path), 0
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="np") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total + (count_parameters(base) if base is not None else 0)


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model directory; `PolicyError` if the file is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} cannot be read ({error}); save the model again") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{path} holds no JSON object; save the model again")
    return value


def model_digest(path: Path) -> str:
    """Return a digest of a model directory: weights, configuration and tokenizer, and those of an adapter's base.

    A file is read once per process, unless its size or modification time changes.
    """
    total = hashlib.blake2b(digest_size=16)
    patterns = ("*.safetensors", *_NAMED_FILES, *_TOKENIZER_FILES)
    for file in sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()}):
        total.update(file.name.encode() + b"\0" + _file_digest(file))
    base = adapter_base(path)
    if base is not None:
        total.update(model_digest(base).encode())
    return total.hexdigest()


def policy_digest(path: Path) -> str:
    """Return the digest of a trained policy: its `model_digest`, or one over a picker's directories."""
    parts = sorted({path, *(file.parent for file in path.rglob("*.safetensors"))})
    names = {part.relative_to(path).as_posix(): model_digest(part) for part in parts}
    return digest(names) if len(names) > 1 else names["."]


def refuse_changed_weights(path: Path) -> None:
    """Refuse a trained policy with other files than its training wrote; a record without a digest allows any."""
    record = path / "training.json"
    written = read_model_json(record).get("weights") if record.is_file() else None
    if written and written != policy_digest(path):
        raise PolicyError(
            f"{path} holds other weights, settings or tokenizer files than its training wrote (training.json has their "
            "digest; so has an adapter's base); put the files back, or train the policy again"
        )


def check_finite(model: Any, path: Path) -> None:
    """Refuse NaN or infinite weights; the `PolicyError` names the first of them."""
    for name, weight in model.named_parameters():
        known = weight.is_floating_point() and weight.itemsize > 1 and weight.numel() and not weight.is_meta
        if known and not all(end.isfinite() for end in weight.detach().aminmax()):
            raise PolicyError(f"{path}: {name} holds NaN or infinite weights; put the files back, or train it again")


def _file_digest(file: Path) -> bytes:
    status = file.stat()
    key = (str(file.resolve()), status.st_mtime_ns, status.st_size)
    if key not in _digests:
        with file.open("rb") as stream:
            _digests[key] = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()
    return _digests[key]


def adapter_base(path: Path) -> Path | None:
    """Return the directory of an adapter's base model; None if ``path`` holds full weights."""
    config = path / "adapter_config.json"
    if not config.is_file():
        return None
    name = read_model_json(config).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise PolicyError(f"{config} names no base_model_name_or_path; set it, or save the adapter again")
    beside = path / name
    return find_model(beside if beside.is_dir() else name)


def pick_device(device: str) -> str:
    """Return a device; ``auto`` is a GPU if there is one. `PolicyError` if the device is missing."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(f"device: {device} is not available here ({reason(error)}); use auto or cpu") from error
    return device


def positions(model: Any) -> int | None:
    """Return a model's longest sequence in tokens; None if its configuration has no limit."""
    n = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return n if isinstance(n, int) and n > 0 else None


def load_tokenizer(path: Path, template: str | None = None) -> Any:
    """Load the tokenizer of a model directory, or of an adapter's base; `PolicyError` without a chat template.

    With ``template`` plain, a tokenizer without a template gets one that is the same for all models, so that a digest
    of the files still identifies the policy. A tokenizer with another template is refused.
    """
    from transformers import AutoTokenizer

    source = path
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        source = adapter_base(path) or path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise PolicyError(
            f"{source} has no tokenizer that can be loaded ({reason(error)}); "
            "save it there with tokenizer.save_pretrained"
        ) from error
    if template == "plain" and tokenizer.chat_template not in {None, _PLAIN}:
        raise PolicyError(
            f"policy.template: plain is for models without a chat template, and the tokenizer of {source} has one; "
            "leave policy.template out"
        )
    if template == "plain":
        tokenizer.chat_template = _PLAIN
    if not tokenizer.chat_template:
        raise PolicyError(
            f"the tokenizer of {source} has no chat template, so messages cannot become a prompt; set policy.template: "
            "plain for a base model, or set tokenizer.chat_template and save it"
        )
    return tokenizer


def read_picker(settings: PickerSettings) -> tuple[PickerSettings, dict[str, Any] | None]:
    """Return a picker's settings, with the architecture that leret saved, and its record.

    A pretrained encoder and a picker from scratch have no record.
    """
    directory = Path(settings.model)
    if not (directory / PICKER_RECORD).is_file():
        if isinstance(settings, FeaturesSettings) and settings.model != "scratch":
            raise PolicyError(
                f"policy.model: {directory} holds no picker of kind features; name a directory that "
                "`leret train` wrote, or leave it out to start from nothing"
            )
        return settings, None
    record = read_model_json(directory / PICKER_RECORD)
    if record.get("version") != PICKER_VERSION:
        raise PolicyError(f"{directory} was written by another version of leret; train the picker again")
    if record.get("kind") != settings.kind:
        raise PolicyError(f"{directory} is a picker of kind {record.get('kind')}; set policy.kind to that")
    refuse_changed_weights(directory)
    return type(settings).model_validate({**settings.model_dump(), **record["settings"]}), record


def picker_digest(settings: PickerSettings) -> str:
    """Return a name for the picker's weights, architecture, decoding and feature function."""
    model, (settings, record) = settings.model, read_picker(settings)
    content = None if model == "scratch" else bundled.model_digest(Path(model) if record else find_model(model))
    source = source_digest(settings.features) if isinstance(settings, FeaturesSettings) else None
    decoding = [settings.top_k, settings.beam, settings.budget]
    return digest(settings.kind, settings.architecture(), decoding, source, content)
