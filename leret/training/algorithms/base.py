"""What makes an algorithm, and what all of them share: TRL's arguments, and the oracle's log-probabilities."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.training import LoraSettings, TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.local.model import architecture_of
from leret.training.data import Encoded, TrainingExample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainerInputs:
    """What a trainer is built from."""

    model: Any  # full weights, or a peft model
    tokenizer: Any
    examples: Sequence[Encoded]  # none longer than the policy takes
    directory: Path  # for checkpoints
    device: str  # cpu, cuda ...
    max_steps: int | None = None  # optimizer steps instead of the recipe's epochs

    def share_prompts(self) -> bool:
        """Let the model take packed batches: on a CPU, where a model in one process is what it was loaded as."""
        from leret.training.packing import share_prompts

        return self.device == "cpu" and n_processes() == 1 and share_prompts(self.model)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to train.

    Attributes:
        settings: its recipe class, whose ``algorithm`` is a literal: the name in recipes.
        read_examples: what it trains on, of a run.
        make_trainer: a `transformers.Trainer` over ids.
        oracle_loss: the loss of rows of its data set by the model's plain forward, one sequence at a time.
        describe: for the model card: what it is, with its source.
    """

    settings: type[TrainingRecipe]
    read_examples: Callable[[Any, Run], list[TrainingExample]]
    make_trainer: Callable[[Any, TrainerInputs], Any]
    oracle_loss: Callable[[Any, Any, Sequence[Mapping[str, Any]]], float]
    describe: Callable[[Any], str]


def trainer_arguments(recipe: TrainingRecipe, inputs: TrainerInputs) -> dict[str, Any]:
    """A recipe as arguments of `transformers.TrainingArguments`; the trackers are `leret.training.callbacks`' own."""
    cpu = inputs.device == "cpu"
    same = (
        "num_train_epochs learning_rate lr_scheduler_type optim weight_decay per_device_train_batch_size "
        "gradient_accumulation_steps max_grad_norm seed save_steps logging_steps"
    )
    return {name: getattr(recipe, name) for name in same.split()} | {
        "output_dir": str(inputs.directory),
        "max_steps": inputs.max_steps or -1,
        "warmup_steps": recipe.warmup_steps or recipe.warmup_ratio,  # below 1 it is a share, in transformers 5
        "data_seed": recipe.seed,
        "use_cpu": cpu,
        "bf16": recipe.dtype == "bfloat16",
        "gradient_checkpointing": not cpu,
        "dataloader_pin_memory": not cpu,
        "save_strategy": "steps",
        "save_total_limit": 2,
        "logging_strategy": "steps",
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "max_length": None,
        "remove_unused_columns": False,
    }


def build_trainer(
    kind: Any, recipe: TrainingRecipe, inputs: TrainerInputs, arguments: Any, rows: Mapping[str, list[Any]], **more: Any
) -> Any:
    """A trainer of TRL's over rows, with a new adapter where the recipe asks for one."""
    return kind(
        model=inputs.model,
        args=arguments,
        train_dataset=rows_dataset(rows, inputs.directory, arguments),
        processing_class=inputs.tokenizer,
        peft_config=new_adapter(recipe.lora, inputs.model),
        **more,
    )


def build_with_reference(
    kind: Any, recipe: TrainingRecipe, inputs: TrainerInputs, arguments: Any, rows: Mapping[str, list[Any]], **more: Any
) -> Any:
    """`build_trainer` of a kind that computes the log-probabilities of the initial policy before it returns.

    Under FSDP, TRL takes a second model for them, which it would load by the first one's name: of an adapter that was
    merged into it, this is the base. With an adapter in training it would run what is still on the CPU.
    """
    reference = None
    if n_processes() > 1 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        if recipe.lora is not None:
            raise TrainingError(
                f"lora: {recipe.algorithm} with an adapter does not train under FSDP (TRL issue 6470); --launch zero3 "
                "shards its base, --launch multi has the base on each GPU"
            )
        reference = copy.deepcopy(inputs.model)
    trainer = build_trainer(kind, recipe, inputs, arguments, rows, ref_model=reference, **more)
    trainer.ref_model = None  # the rows have all that is needed of it
    return trainer


def n_processes() -> int:
    """Processes of this training."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rows_dataset(rows: Mapping[str, list[Any]], directory: Path, arguments: Any) -> Any:
    """The rows; on disk where several processes train: TRL shares the reference's values in a file beside them."""
    from datasets import Dataset, load_from_disk

    if arguments.world_size == 1:
        return Dataset.from_dict(rows)
    path = directory / "rows"
    with arguments.main_process_first():
        if arguments.process_index == 0:
            Dataset.from_dict(rows).save_to_disk(path)
        return load_from_disk(str(path))


def new_adapter(settings: LoraSettings | None, model: Any) -> Any:
    """Peft's configuration of the adapter that is to be made; None for full weights, or where there is one already."""
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


def completion_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Return the (n_tokens,) float32 log-probabilities of a completion, by the model's plain forward pass."""
    return architecture_of(model).logps(model, prompt, completion)
