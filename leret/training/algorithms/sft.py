"""Supervised fine-tuning on the best completions: LeReT's context distillation, through TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.training.algorithms.base import Algorithm, TrainerInputs, completion_logps, new_adapter, trainer_arguments
from leret.training.data import Encoded, TrainingExample

IGNORED = -100
"""The label of a token that has no loss, as torch and transformers have it."""


class SFTRecipe(TrainingRecipe):
    """Supervised fine-tuning."""

    algorithm: Literal["sft"] = "sft"
    targets: Literal["best", "random"] = Field("best", description="the best sample of a state, or any (control)")
    require_spread: bool = Field(True, description="only states whose samples differ in reward")
    max_targets: PositiveInt = Field(1, description="completions a state at most")

    @property
    def is_control(self) -> bool:
        """Steps of another policy, or targets that ignore the reward."""
        return self.match_steps_of is not None or self.targets != "best"


def read_examples(recipe: SFTRecipe, run: Run) -> list[TrainingExample]:
    """The targets of the run's states under the zero-shot prompt."""
    from leret.sampling.preferences.dataset import sft_targets
    from leret.sampling.store.store import Store

    with Store(run.store, read_only=True) as store:
        targets = sft_targets(
            store,
            which=recipe.targets,
            require_spread=recipe.require_spread,
            max_targets=recipe.max_targets,
            seed=recipe.seed,
            policy_digest=run.manifest().get("digests", {}).get("policy"),
        )
    if not targets:
        raise TrainingError(
            "the run has no target for SFT: no state whose samples differ in reward. Sample more questions, more "
            "prompts or samples a state, or set require_spread: false to train on every state"
        )
    return [TrainingExample(row["question_id"], tuple(row["prompt"]), (row["completion"],)) for row in targets]


class TargetCollator:
    """Batches rows of `sft_rows`; ``packed`` for a model that `share_prompts` has prepared."""

    def __init__(self, pad: int, *, packed: bool = False) -> None:
        self.pad, self.packed = pad, packed

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Ids with labels."""
        from leret.training.packing import collate

        batch = collate([_sequence(row) for row in rows], self.pad, packed=self.packed)
        return batch | {"labels": batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, IGNORED)}


def make_trainer(recipe: SFTRecipe, inputs: TrainerInputs) -> Any:
    """TRL's SFTTrainer over rows of ids; the loss is on the completion and its end token."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from leret.training.packing import share_prompts

    packed = inputs.device == "cpu" and share_prompts(inputs.model)
    return SFTTrainer(
        model=inputs.model,
        args=SFTConfig(
            **trainer_arguments(recipe, inputs),
            completion_only_loss=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        data_collator=TargetCollator(inputs.tokenizer.pad_token_id, packed=packed),
        train_dataset=Dataset.from_dict(sft_rows(inputs.examples)),
        processing_class=inputs.tokenizer,
        peft_config=new_adapter(recipe.lora, inputs.model),
    )


def sft_rows(examples: Sequence[Encoded]) -> dict[str, list[list[int]]]:
    """Columns ``input_ids`` and ``labels``, the prompt's labels ignored."""
    return {
        "input_ids": [example.prompt + example.completions[0] for example in examples],
        "labels": [[IGNORED] * len(example.prompt) + example.completions[0] for example in examples],
    }


def oracle_loss(recipe: SFTRecipe, model: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean negative log-probability of the targets' tokens."""
    import torch

    return float(-torch.cat([completion_logps(model, *_sequence(row)) for row in rows]).mean())


def _sequence(row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    n = row["labels"].count(IGNORED)
    return row["input_ids"][:n], row["input_ids"][n:]


def describe(recipe: SFTRecipe) -> str:
    """For the model card."""
    return "supervised fine-tuning on the best completions a state (context distillation)"


SFT = Algorithm(SFTRecipe, read_examples, make_trainer, oracle_loss, describe)
