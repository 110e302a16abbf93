"""Supervised fine-tuning on the best completions (LeReT's context distillation) or on answers, by TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field, PositiveInt

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.sampling.preferences.dataset import state_targets
from leret.training.algorithms.base import Algorithm, TrainerInputs, build_trainer, completion_logps, trainer_arguments
from leret.training.data import Encoded, TrainingExample, finished_states, plain

IGNORED = -100
"""The label of a token that has no loss, as torch and transformers have it."""


class SFTRecipe(TrainingRecipe):
    """Supervised fine-tuning."""

    algorithm: Literal["sft"] = "sft"
    targets: Literal["best", "random", "answer"] = Field(
        "best", description="the best sample of a state, any (a control), or the reference answer of the task"
    )
    field: str = Field("answer", description="of targets answer: the predictor's only output field")
    require_spread: bool = Field(True, description="only states whose samples differ in reward")
    max_targets: PositiveInt = Field(1, description="completions a state at most")

    @property
    def is_control(self) -> bool:
        """Steps of another policy, or targets that ignore the reward."""
        return self.match_steps_of is not None or self.targets == "random"


def read_examples(recipe: SFTRecipe, run: Run) -> list[TrainingExample]:
    """The targets of the run's states under the zero-shot prompt."""
    if recipe.targets == "answer":
        return reference_answers(recipe, run)
    how = (recipe.targets, recipe.require_spread, recipe.max_targets, recipe.seed)
    examples = [
        TrainingExample(group.state.task_id, plain(group.state.messages), (str(target.completion),))
        for group in finished_states(run, recipe.predictors)
        for target in state_targets(group, *how)
    ]
    if not examples:
        raise TrainingError(
            "the run has no target for SFT: no state whose samples differ in reward. Sample more questions, more "
            "prompts or samples a state, or set require_spread: false to train on every state"
        )
    return examples


def reference_answers(recipe: SFTRecipe, run: Run) -> list[TrainingExample]:
    """The first reference answer of each task, at the states of the predictors that write ``field`` and nothing else.

    They need not have been sampled: a predictor that got one completion a state, without a reward, is trained as well.
    """
    from leret.rollouts.environment import Environment
    from leret.sampling.store.store import Store

    with Environment.open(run) as environment, Store(run.store, read_only=True) as store:
        answers = {task.id: task.answers[0] for task in environment.tasks(check=False) if task.answers}
        fields = {
            name: list(environment.formatter.signature(name).output_fields) for name in environment.replay.predictors
        }
        writers = {name for name in recipe.predictors or fields if fields.get(name) == [recipe.field]}
        examples = [
            TrainingExample(
                group.state.task_id,
                plain(group.state.messages),
                (
                    environment.formatter.completion(
                        group.state.predictor, {recipe.field: answers[group.state.task_id]}
                    ),
                ),
            )
            for group in store.groups(run.manifest.policy_digest)
            if group.state.predictor in writers and group.state.task_id in answers
        ]
    if not examples:
        written = "; ".join(f"{name} writes {', '.join(names)}" for name, names in fields.items())
        raise TrainingError(
            f"targets: answer needs states of a predictor that writes {recipe.field} alone ({written}), of questions "
            f"with reference answers ({len(answers)} have one); name its output in `field`, or take targets: best, "
            "which imitates whole completions"
        )
    return examples


def collate_targets(rows: list[dict[str, Any]], pad: int, *, packed: bool = False) -> dict[str, Any]:
    """A batch of rows of `sft_rows`, ids with labels; ``packed`` for a model that `share_prompts` has prepared."""
    from leret.training.packing import collate

    batch = collate([_sequence(row) for row in rows], pad, packed=packed)
    return batch | {"labels": batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, IGNORED)}


def make_trainer(recipe: SFTRecipe, inputs: TrainerInputs) -> Any:
    """TRL's SFTTrainer over rows of ids; the loss is on the completion and its end token."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **trainer_arguments(recipe, inputs),
        completion_only_loss=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    collator = partial(collate_targets, pad=inputs.tokenizer.pad_token_id, packed=inputs.share_prompts())
    return build_trainer(SFTTrainer, recipe, inputs, arguments, sft_rows(inputs.examples), data_collator=collator)


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


def _describe(recipe: SFTRecipe) -> str:
    what = "reference answers" if recipe.targets == "answer" else f"the {recipe.targets} completions of a state"
    return f"supervised fine-tuning on {what}"


SFT = Algorithm(SFTRecipe, read_examples, make_trainer, oracle_loss, _describe)
