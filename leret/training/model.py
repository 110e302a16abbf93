"""Initial weights for training: the sampled policy, a trained policy of the run, or a directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from leret.config.load import sampling_recipe_of
from leret.config.policy import PickerSettings
from leret.config.sampling import SamplingRecipe
from leret.config.training import LoraSettings, RoundRecipe, TrainingRecipe, WriterKeys
from leret.core.bundled import POLICIES
from leret.core.errors import MissingDependency, TrainingError
from leret.core.runs import Run
from leret.policies.checkpoints import (
    HUB_NAME,
    PICKER_RECORD,
    adapter_base,
    count_parameters,
    find_model,
    load_tokenizer,
    model_digest,
    picker_digest,
    sampled_model,
    sampled_settings,
)
from leret.policies.local.model import load_weights, merge_into

R = TypeVar("R", bound=TrainingRecipe)


@dataclass(frozen=True, slots=True)
class InitialPolicy:
    """Policy at the start of training."""

    name: str  # init_from: base, a policy of the run, or a directory
    directory: Path  # with full weights or an adapter
    digest: str  # digest of the weights
    total_steps: int = 0  # optimizer steps since the base model
    template: str | None = None  # as in policy.template
    actors: Mapping[str, InitialPolicy] = field(default_factory=dict)  # of a joint training

    @property
    def base_model(self) -> str:
        """Hub name, if the directory is a snapshot in ``models--OWNER--NAME``.

        Otherwise it is the directory's name.
        """
        of_hub = [part for part in self.directory.parts if part.startswith("models--")]
        if not of_hub:
            return self.directory.name
        return of_hub[-1].removeprefix("models--").replace("--", "/", 1)


def find_initial(
    run: Run,
    init_from: str,
    predictors: Collection[str] | None = None,
    *,
    key: str = "init_from",
) -> InitialPolicy:
    """Find the policy ``init_from``, which the recipe names in ``key``.

    Raise `TrainingError` if it is unknown, damaged, or changed since sampling.
    """
    trained = run.policies / init_from
    if init_from == "base":
        model = sampled_model(run, predictors)
    elif (trained / "training.json").is_file():
        model = str(actor_directory(trained, "writer"))
    elif init_from in POLICIES or Path(init_from).is_dir() or HUB_NAME.fullmatch(init_from):
        model = init_from
    else:
        names = sorted(path.parent.name for path in run.policies.glob("[!.]*/training.json"))
        available = ", ".join(names) or "none"
        raise TrainingError(
            f"{key}: {init_from!r} is not 'base', a trained policy in {run.path} (available: "
            f"{available}) or a directory; train {init_from} first, or change {key}"
        )
    path = find_model(model).resolve()
    digest = model_digest(path)
    directory = path
    if init_from == "base":
        _check_unchanged(run, path, digest, predictors)
    elif trained.is_dir():
        directory = trained
    total = int(training_record(directory).get("total_steps", 0))
    template = sampled_settings(run, predictors).get("template")
    return InitialPolicy(init_from, path, digest, total, template)


def find_writer(run: Run, recipe: TrainingRecipe) -> InitialPolicy:
    """Return the initial policy of an algorithm that trains a policy to write text."""
    return find_initial(run, recipe.init_from, recipe.predictors)


def with_learning_rate(recipe: R, initial: InitialPolicy) -> R:
    """Return the recipe with a learning rate.

    If none is set, choose and log a default for the model size.
    """
    if "writer" in initial.actors:
        writer = with_learning_rate(recipe.writer, initial.actors["writer"])  # type: ignore[attr-defined]
        return recipe.model_copy(update={"writer": writer})
    if recipe.learning_rate is not None or not isinstance(recipe, WriterKeys):
        return recipe
    # unknown if a server has the weights
    n_parameters = count_parameters(initial.directory) or 10**9
    rate = recipe.learning_rate_for(n_parameters)
    logging.getLogger("leret").info(
        "%s: learning_rate %g, chosen for %.3g parameters",
        type(recipe).__name__,
        rate,
        n_parameters,
    )
    return recipe.model_copy(update={"learning_rate": rate})


def find_picker(run: Run, recipe: RoundRecipe) -> InitialPolicy:
    """Return the initial picker: the run's, a trained picker of the run, or one in a directory."""
    settings = sampled_picker(sampling_recipe_of(run), recipe)
    record = run.policies / recipe.init_from
    paths = (actor_directory(record, "picker"), Path(recipe.init_from))
    trained = next((path for path in paths if (path / PICKER_RECORD).is_file()), None)
    if trained is None and recipe.init_from != "base":
        raise TrainingError(
            f"init_from: {recipe.init_from!r} is not 'base', a trained picker in {run.path} or a "
            "picker directory; train the picker first, or change init_from"
        )
    directory = trained or Path(settings.model)
    total = int(training_record(record if record.is_dir() else directory).get("total_steps", 0))
    digest = picker_digest(settings.model_copy(update={"model": str(directory)}))
    return InitialPolicy(recipe.init_from, directory, digest, total)


def actor_directory(policy: Path, actor: str) -> Path:
    """Return the directory of an actor if the policy was trained jointly, else the policy's."""
    return policy / actor if (policy / actor).is_dir() else policy


def sampled_picker(sampling: SamplingRecipe, recipe: RoundRecipe) -> PickerSettings:
    """Return the settings of the picker with which the run was sampled."""
    settings = sampling.policy_of(recipe.predictors)
    if not isinstance(settings, PickerSettings):
        raise TrainingError(
            f"algorithm: {recipe.algorithm} trains a picker, but the run's policy has kind "
            f"{settings.kind}; set policy.kind (or policies.NAME.kind) to features or encoder in "
            "the sampling recipe, or change predictors"
        )
    return settings


def training_record(directory: Path) -> dict[str, Any]:
    """Return the content of a policy's training.json; {} if there is no such file."""
    path = directory / "training.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}); remove {directory} and train again"
        ) from error


def _check_unchanged(run: Run, path: Path, digest: str, predictors: Collection[str] | None) -> None:
    rounds = run.manifest.rounds
    if sampled_settings(run, predictors).get("kind") != "local" or not rounds:
        return
    first = rounds[0]
    digests = first.get("digests", {"": first["digest"]})  # by predictor; "" is the default policy
    if not digests:
        return
    sampled = {digests.get(name, digests[""]) for name in predictors or [""]}
    if digest not in sampled:
        raise TrainingError(
            f"the policy in {path} is no longer the one that {run.path} was sampled from, because "
            "its files changed; restore the files, or sample a new run with the changed policy"
        )


def load_for_training(
    initial: InitialPolicy, lora: LoraSettings | None, dtype: str
) -> tuple[Any, Any]:
    """Return the policy's model in training mode, and its tokenizer.

    Weights stay in float32 while autocast computes in bfloat16, because bfloat16 weights lose
    updates at small learning rates. Only the frozen base of an adapter is loaded in bfloat16.
    """
    frozen = lora is not None and dtype == "bfloat16"
    base = adapter_base(initial.directory)
    quantization = (
        quantization_arguments(lora.quantization) if lora is not None and lora.quantization else {}
    )
    model = load_weights(
        base or initial.directory, "bfloat16" if frozen else "float32", **quantization
    )
    if base is not None:
        model = _with_adapter(model, initial.directory, lora)
    _disable_dropout(model)
    model.train()
    tokenizer = load_tokenizer(initial.directory, initial.template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return model, tokenizer


def _disable_dropout(model: Any) -> None:
    """Set all dropout to 0.

    TRL disables only dropout modules, but OPT's layers call the dropout function.
    """
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def quantization_arguments(kind: str) -> dict[str, Any]:
    """Return ``from_pretrained`` arguments that load a frozen base in 4 bits on this process's GPU.

    Source: QLoRA, Dettmers et al. 2023, arXiv 2305.14314, section 3 (``nf4`` and double
        quantization).
    """
    import torch
    from transformers import BitsAndBytesConfig

    if not torch.cuda.is_available():
        raise TrainingError(
            f"lora.quantization: {kind} needs a CUDA GPU, but no GPU is available; remove "
            "lora.quantization to load the base in the recipe's dtype"
        )
    if find_spec("bitsandbytes") is None:
        raise MissingDependency("bitsandbytes", "train", command="pip install bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def _with_adapter(model: Any, directory: Path, settings: LoraSettings | None) -> Any:
    """Load a saved adapter onto its base model, to be trained if the recipe has ``lora``.

    Otherwise the adapter is merged.
    """
    if settings is None:
        return merge_into(model, directory).requires_grad_(True)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, str(directory), is_trainable=True)
    saved: Any = loaded.peft_config["default"]
    if (saved.r, saved.lora_alpha) != (settings.r, settings.alpha):
        raise TrainingError(
            f"the adapter in {directory} has r {saved.r} and alpha {saved.lora_alpha}, but the "
            f"recipe has r {settings.r} and alpha {settings.alpha}; set lora.r and lora.alpha to "
            "the adapter's values, or remove lora to merge the adapter"
        )
    return loaded


def new_adapter(settings: LoraSettings | None, model: Any) -> Any:
    """Return the peft configuration for a new adapter.

    Return None for full weights or a model that already has an adapter.
    """
    if settings is None or hasattr(model, "peft_config"):
        return None
    from peft import LoraConfig

    targets = settings.target_modules
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def save_policy(
    model: Any, tokenizer: Any, directory: Path, state: Mapping[str, Any] | None = None
) -> None:
    """Write a model or adapter as safetensors, with its tokenizer.

    ``state``, if given, is written as the weights.
    """
    peft = hasattr(model, "peft_config")
    only = {"selected_adapters": ["default"]} if peft else {}
    model.save_pretrained(directory, state_dict=state, safe_serialization=True, **only)
    tokenizer.save_pretrained(directory)
    if not peft and model.can_generate():
        model.generation_config.save_pretrained(directory)


def library_of(model: Any) -> str:
    """Return the library that loads the saved model (for the model card)."""
    return "peft" if hasattr(model, "peft_config") else "transformers"


LOAD = "`leret.load` opens the run's `program` directory: the program and a policy."


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """What the model card says of the files of a trained policy.

    Attributes:
        base_model: name of the model at the start of all training.
        library: library that loads the files.
        noun: what was trained.
        use: how to use it.
        pipeline: task on the Hugging Face hub.
        tag: tag on the hub.
    """

    base_model: str
    library: str
    noun: str = "policy that writes search queries"
    use: str = (
        "It answers prompts in the format of the program's adapter. Any OpenAI-compatible server can "
        f"serve it. {LOAD}"
    )
    pipeline: str = "text-generation"
    tag: str = "trl"
