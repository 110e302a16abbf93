"""Algorithms that train on stored samples, and the engine that wraps their TRL trainer."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leret.config.training import ExampleRecipe, LoraSettings, TrainingRecipe, WriterKeys
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.checkpoints import positions
from leret.policies.local.chat_template import end_token
from leret.policies.local.model import (
    architecture_of,
    evaluation_mode,
    stop_ids,
)
from leret.training.data import (
    RunSamples,
    Samples,
    TokenEncoder,
    TrainingExample,
    check_parity,
    has_sampled_tokenizer,
)
from leret.training.model import (
    InitialPolicy,
    SavedPolicy,
    find_writer,
    library_of,
    load_for_training,
    new_adapter,
    save_policy,
)
from leret.training.processes import IS_MAIN, N_PROCESSES, from_main

if TYPE_CHECKING:
    import torch
    from transformers import TrainerCallback, TrainerState

    from leret.training.data import Encoded
    from leret.training.driver import Engine
    from leret.training.job import TrainingJob
    from leret.training.validation import Validation


@dataclass(frozen=True, slots=True)
class TrainerInputs:
    """Trainer arguments that are not part of a recipe."""

    model: Any  # full weights, or a peft model
    tokenizer: Any
    examples: Sequence[Encoded]  # without examples that exceed the maximum length
    directory: Path  # for checkpoints
    device: str  # cpu, cuda ...
    max_steps: int | None = None  # optimizer steps instead of the recipe's epochs


@dataclass(frozen=True, slots=True)
class StoredAlgorithm:
    """An algorithm that trains on stored samples.

    Attributes:
        settings: recipe class; the literal type of its ``algorithm`` field names the algorithm in
            recipes.
        make_trainer: builds a `transformers.Trainer` over token ids.
        describe: describes a recipe and cites its source, for the model card.
        find_initial: finds the policy at the start of training.
    """

    settings: type[ExampleRecipe]
    examples: Callable[[Any, Samples], list[TrainingExample]]
    make_trainer: Callable[[Any, TrainerInputs], Any]
    describe: Callable[[Any], str]
    find_initial: Callable[[Run, Any], InitialPolicy] = find_writer

    is_online: ClassVar[bool] = False

    def inputs(self, recipe: Any, run: Run) -> list[TrainingExample]:
        return self.examples(recipe, RunSamples(run, recipe.predictors))

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[Engine]:
        recipe: Any = job.recipe
        model, tokenizer = load_for_training(job.initial, recipe.lora, recipe.dtype)
        examples = self.encode(job, tokenizer, stop_ids(model.generation_config), positions(model))
        max_steps = recipe.max_steps if job.max_steps is None else job.max_steps
        inputs = TrainerInputs(model, tokenizer, examples, job.directory.path, device, max_steps)
        trainer = self.make_trainer(recipe, inputs)
        engine = TRLEngine(
            trainer, tokenizer, job, len(examples), dropped=len(job.inputs) - len(examples)
        )
        engine.preflight = check_logps(trainer, recipe.dtype)
        yield engine
        trainer.accelerator.wait_for_everyone()

    def encode(
        self, job: TrainingJob, tokenizer: Any, stops: Sequence[int], n_positions: int | None
    ) -> list[Encoded]:
        recipe: Any = job.recipe
        examples: Any = job.inputs
        encoder = TokenEncoder(tokenizer, end_token(tokenizer, stops), job.enable_thinking, stops)
        same = False
        if job.run is not None:
            same = has_sampled_tokenizer(job.run, job.initial, recipe.predictors)
        encoded = encoder.encode(examples, same_tokenizer=same)
        check_parity(job.run, job.initial, encoder, recipe.predictors)
        limit = min(recipe.max_length, n_positions or recipe.max_length)
        fitting = [example for example in encoded if example.length <= limit]
        if not fitting:
            shortest = min(example.length for example in encoded)
            raise TrainingError(
                f"none of {len(encoded)} examples fits into {limit} tokens (the shortest has "
                f"{shortest}); raise max_length ({recipe.max_length}; the policy's maximum is "
                f"{n_positions}) or shorten the program's prompts"
            )
        return fitting


def check_logps(trainer: Any, dtype: str) -> float | None:
    """Compare TRL's log-probability of a completion under the initial policy with the model's own.

    TRL multiplies the last hidden state by the output matrix. If a model's head does more, TRL's
    log-probabilities are wrong, yet its DPO and IPO losses are correct until the first update.
    Return the difference divided by the model's log-probability (or by 1, if that is below 1); None
    for sft, which has no reference, and under ZeRO-3, which shards the weights between steps.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    import torch
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return None

    model = trainer.model
    row = min(trainer.train_dataset, key=lambda row: len(row["prompt_tokens"]))
    if "ref_chosen_logps" in row:
        completion = row["chosen_tokens"]
        computed = row["ref_chosen_logps"]
    elif "ref_logps" in row:
        completion = row["completion_tokens"]
        computed = row["ref_logps"]
    else:
        return None
    with torch.no_grad(), evaluation_mode(model):
        expected = float(completion_logps(model, row["prompt_tokens"], completion).sum())
    difference: float = abs(computed - expected) / max(1.0, abs(expected))
    if not difference <= (1e-4 if dtype == "float32" else 5e-2):
        raise TrainingError(
            f"TRL computes a log-probability of {computed:.6g} for a completion of "
            f"{type(model).__name__}, but the model's forward pass gives {expected:.6g}. TRL requires "
            "logits that are the last hidden state times one output matrix; use an architecture with "
            "such a head (Llama, Qwen, OPT ...)"
        )
    return difference


class TRLEngine:
    """Engine (`leret.training.driver.Engine`) that wraps a TRL trainer."""

    def __init__(
        self, trainer: Any, tokenizer: Any, job: TrainingJob, examples: int, dropped: int = 0
    ) -> None:
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)
        self.trainer = trainer
        self.examples = examples
        self.dropped = dropped
        self.preflight: float | None = None
        self._tokenizer = tokenizer
        self.base_model = job.initial.base_model

    @property
    def state(self) -> TrainerState:
        state: TrainerState = self.trainer.state
        return state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self.trainer.state = state

    @property
    def steps(self) -> int:
        return int(self.state.global_step)

    def add_callback(self, callback: TrainerCallback) -> None:
        self.trainer.add_callback(callback)

    def train(self, checkpoint: Path | None) -> None:
        self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def log(self, figures: dict[str, float]) -> None:
        from transformers import Trainer

        # TRL's override would add its training averages to this entry.
        Trainer.log(self.trainer, figures)

    def validate(self, validation: Validation) -> dict[str, float]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return from_main(lambda: validation.run_model(model, self._tokenizer, self.steps))

    def load(self, checkpoint: Path) -> None:
        if self.trainer.is_deepspeed_enabled:
            raise TrainingError(
                "training was interrupted after its last step, and DeepSpeed cannot load a "
                f"finished checkpoint; delete {checkpoint} and run the command again to resume "
                "from the previous checkpoint"
            )
        self.trainer._load_from_checkpoint(str(checkpoint))

    def save(self, directory: Path) -> SavedPolicy:
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model)
        state = accelerator.get_state_dict(self.trainer.model_wrapped)
        if IS_MAIN:
            save_policy(model, self._tokenizer, directory, state)
        return SavedPolicy(self.base_model, library_of(model))


def trainer_arguments(recipe: TrainingRecipe, inputs: TrainerInputs) -> dict[str, Any]:
    """Return arguments for `transformers.TrainingArguments`, without trackers."""
    cpu = inputs.device == "cpu"
    keys = type(recipe).model_fields
    same = (
        "num_train_epochs learning_rate lr_scheduler_type optim weight_decay "
        "per_device_train_batch_size gradient_accumulation_steps max_grad_norm seed save_steps "
        "logging_steps"
    )
    return {name: getattr(recipe, name) for name in same.split() if name in keys} | {
        "output_dir": str(inputs.directory),
        "max_steps": inputs.max_steps or -1,
        "warmup_steps": recipe.warmup_steps
        or recipe.warmup_ratio,  # transformers 5 reads a value below 1 as a ratio
        "data_seed": recipe.seed,
        "use_cpu": cpu,
        "bf16": isinstance(recipe, WriterKeys) and recipe.dtype == "bfloat16",
        "gradient_checkpointing": not cpu,
        "dataloader_pin_memory": not cpu,
        "save_total_limit": 2,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def build_trainer(
    kind: Any,
    inputs: TrainerInputs,
    arguments: Any,
    rows: Mapping[str, list[Any]],
    lora: LoraSettings | None,
    **more: Any,
) -> Any:
    """Return a TRL trainer over the rows.

    ``lora`` adds a new adapter.
    """
    return kind(
        model=inputs.model,
        args=arguments,
        train_dataset=_rows_dataset(rows, inputs.directory, arguments),
        processing_class=inputs.tokenizer,
        peft_config=new_adapter(lora, inputs.model),
        **more,
    )


def stored_trainer(
    name: str,
    recipe: Any,
    inputs: TrainerInputs,
    rows: Mapping[str, list[Any]],
    collate: Callable[..., Any],
    **keys: Any,
) -> Any:
    """Return TRL's trainer ``name`` (SFT, DPO, KTO) over rows of token ids.

    ``collate`` joins rows to batches. ``keys`` are for the trainer's configuration. With
    ``precompute_ref_log_probs``, the rows include the initial policy's log-probabilities; a
    training of less than an epoch then gets only the rows that it visits.

    Under FSDP, TRL would load the reference model by name, and a merged adapter still has the base
    model's name. So this function passes a copy of the policy. With ``lora`` it fails: TRL would
    leave weights on the CPU.
    """
    import trl

    from leret.policies.local.packing import share_prompts

    more: dict[str, Any] = {}
    has_references = "precompute_ref_log_probs" in keys
    if has_references and N_PROCESSES > 1 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        if recipe.lora is not None:
            raise TrainingError(
                f"lora: FSDP cannot train an adapter with {recipe.algorithm} (TRL issue 6470); use "
                "--launch zero3 (shards the base model) or --launch multi (copies the base model "
                "to each GPU)"
            )
        more["ref_model"] = copy.deepcopy(inputs.model)
    arguments = getattr(trl, f"{name}Config")(
        **trainer_arguments(recipe, inputs), max_length=None, **keys
    )
    if has_references:
        rows = _first_epoch(arguments, rows, len(inputs.examples))
    packed = inputs.device == "cpu" and N_PROCESSES == 1 and share_prompts(inputs.model)
    collator = partial(collate, pad=inputs.tokenizer.pad_token_id, packed=packed)
    kind = getattr(trl, f"{name}Trainer")
    trainer = build_trainer(
        kind, inputs, arguments, rows, recipe.lora, data_collator=collator, **more
    )
    trainer.ref_model = None  # its log-probabilities are stored in the rows
    return trainer


def _first_epoch(
    arguments: Any, rows: Mapping[str, list[Any]], n_rows: int
) -> Mapping[str, list[Any]]:
    """Return the rows that a Trainer visits.

    If they are not all, set ``arguments`` to visit each once, in order.
    """
    visited = visited_rows(arguments, n_rows)
    if len(visited) == n_rows:
        return rows
    arguments.train_sampling_strategy = "sequential"
    arguments.num_train_epochs = 1
    columns = {}
    for name, values in rows.items():
        columns[name] = [values[row] for row in visited]
    return columns


def visited_rows(arguments: Any, n_rows: int) -> Sequence[int]:
    """Return the rows that a Trainer with these arguments visits, in its order.

    These are all rows if it takes an epoch or more.

    Args:
        arguments: `transformers.TrainingArguments`.
        n_rows: size of the dataset.
    """
    import torch

    per_step = (
        arguments.per_device_train_batch_size
        * arguments.gradient_accumulation_steps
        * arguments.world_size
    )
    n_steps = arguments.max_steps
    if n_steps < 1:
        n_steps = math.ceil(arguments.num_train_epochs * math.ceil(n_rows / per_step))
    if n_steps * per_step >= n_rows:
        return range(n_rows)
    if arguments.train_sampling_strategy == "sequential":
        return range(n_steps * per_step)
    order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(arguments.data_seed))
    rows: list[int] = order[: n_steps * per_step].tolist()
    return rows


def _rows_dataset(rows: Mapping[str, list[Any]], directory: Path, arguments: Any) -> Any:
    """Return the rows as a dataset.

    For several processes it is on disk, where TRL shares the reference values.
    """
    from datasets import Dataset, load_from_disk

    if arguments.world_size == 1:
        return Dataset.from_dict(rows)
    path = directory / "rows"
    with arguments.main_process_first():
        if arguments.process_index == 0:
            Dataset.from_dict(rows).save_to_disk(path)
        return load_from_disk(str(path))


def completion_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Return the (n_tokens,) float32 log-probabilities of a completion, from a plain forward pass."""
    return architecture_of(model).logps(model, prompt, completion)
