"""Supervised fine-tuning on sampled completions, reference answers or documents.

Training on a state's best samples under the zero-shot prompt is LeReT's context distillation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from leret.config.training import ExampleRecipe
from leret.core.errors import TrainingError
from leret.core.types import Sample, Task
from leret.sampling.preferences.dataset import state_targets
from leret.training.data import Encoded, RunSamples, Samples, TrainingExample, plain
from leret.training.stored.trainer import (
    StoredAlgorithm,
    TrainerInputs,
    stored_trainer,
)

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment
    from leret.sampling.store.store import StateSamples

IGNORED = -100  # label that torch and transformers exclude from the loss


class SFTRecipe(ExampleRecipe):
    """Supervised fine-tuning."""

    algorithm: Literal["sft"] = "sft"
    engine: Literal["trl"] = "trl"
    targets: Literal["best", "random", "answer", "document"] = Field(
        "best",
        description="a state's best sample, a random sample (as a control), the task's reference answer, or the start "
        "of its first gold document",
    )
    field: str = Field(
        "answer", description="with targets: answer or document, the predictor's only output field"
    )
    max_words: PositiveInt = Field(24, description="with targets: document, words from its text")
    require_spread: bool = Field(True, description="use only states whose samples differ in reward")
    max_targets: PositiveInt = Field(1, description="maximum completions per state")

    @property
    def is_control(self) -> bool:
        return super().is_control or self.targets == "random"


def examples(recipe: SFTRecipe, samples: Samples) -> list[TrainingExample]:
    """Return target completions for the zero-shot prompt of each state."""
    match recipe.targets:
        case "answer" | "document":
            return _references(recipe, samples)
        case choice:
            spread = recipe.require_spread
            limit = recipe.max_targets
            seed = recipe.seed
    targets = []
    for group in samples.groups():
        chosen = state_targets(group, choice, spread, limit, seed)
        targets += [_target(group, target) for target in chosen]
    if not targets:
        raise TrainingError(
            "the run has no targets for SFT: no state has samples that differ in reward. Sample "
            "more questions, prompts or samples per state, or set require_spread: false to train "
            "on every state"
        )
    return targets


def _target(group: StateSamples, target: Sample) -> TrainingExample:
    """Return a sample as a target.

    The loss excludes its end token if more than 10% of the state's samples were cut. Only short
    samples show an end there, and learning it would make all answers short. A cut target has no end
    token to exclude.
    """
    n_cut = sum(sample.is_cut for sample in group.samples)
    learns_end = target.is_cut or n_cut <= len(group.samples) / 10
    example = TrainingExample.of(group.state, (target,))
    return replace(example, learns_end=learns_end)


def _references(recipe: SFTRecipe, samples: Samples) -> list[TrainingExample]:
    """Return tasks' references as targets, at states of predictors that write only ``field``."""
    from leret.rollouts.environment import Environment
    from leret.sampling.store.store import Store

    kind = recipe.targets
    if not isinstance(samples, RunSamples):
        raise TrainingError(
            f"targets: {kind} needs tasks, which only runs of `leret sample` have; set targets: "
            "best or random"
        )
    run = samples.run
    environment = Environment.open(run)
    formatter = environment.formatter
    tasks = environment.tasks(check=False)
    if kind == "answer":
        references = {task.id: task.answers[0] for task in tasks if task.answers}
    else:
        references = _passages(environment, tasks, recipe.max_words)
    fields = {}
    for name in environment.replay.predictors:
        fields[name] = list(formatter.signature(name).output_fields)
    writers = {name for name in recipe.predictors or fields if fields.get(name) == [recipe.field]}
    targets = []
    with Store(run.store, read_only=True) as store:
        for group in store.groups(run.manifest.policy_digest):
            state = group.state
            if state.predictor in writers and state.task_id in references:
                outputs = {recipe.field: references[state.task_id]}
                completion = formatter.completion(state.predictor, outputs)
                example = TrainingExample(state.task_id, plain(state.messages), (completion,))
                targets.append(example)
    if not targets:
        written = "; ".join(f"{name} writes {', '.join(names)}" for name, names in fields.items())
        thing = "reference answers" if kind == "answer" else "gold documents"
        raise TrainingError(
            f"targets: {kind} needs a predictor that writes only {recipe.field!r} ({written}) and "
            f"questions with {thing} ({len(references)} of {len(tasks)} have one); set `field` to "
            "the predictor's output, or set targets: best to imitate whole completions"
        )
    return targets


def _passages(environment: Environment, tasks: Sequence[Task], max_words: int) -> dict[str, str]:
    """Return the first words of each task's first gold document."""
    corpus = environment.corpus
    passages = {}
    for task in tasks:
        if task.gold and task.gold[0] in corpus:
            words = corpus[task.gold[0]].text.split()
            passages[task.id] = " ".join(words[:max_words])
    return passages


def collate_targets(
    rows: list[dict[str, Any]], pad: int, *, packed: bool = False
) -> dict[str, Any]:
    """Return a batch for TRL's SFTTrainer.

    Labels of prompts and of end tokens not learnt are `IGNORED`. ``packed`` requires a model
    prepared with `share_prompts`.
    """
    from leret.policies.local.packing import collate

    sequences = [(row["prompt_tokens"], row["completion_tokens"]) for row in rows]
    batch = collate(sequences, pad, packed=packed)
    masks = batch.pop("completion_mask")
    for mask, row in zip(masks, rows, strict=True):
        if not row["learns_end"]:
            end_token = mask.nonzero()[-1]
            mask[end_token] = 0
    batch["labels"] = batch["input_ids"].masked_fill(masks == 0, IGNORED)
    return batch


def make_trainer(recipe: SFTRecipe, inputs: TrainerInputs) -> Any:
    """Return TRL's SFTTrainer.

    Its rows hold token ids, and the loss covers the completion and its end token.
    """
    keys = {"completion_only_loss": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    rows = sft_rows(inputs.examples)
    return stored_trainer("SFT", recipe, inputs, rows, collate_targets, **keys)


def sft_rows(encoded: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Return columns of token ids for `collate_targets`."""
    return {
        "prompt_tokens": [example.prompt for example in encoded],
        "completion_tokens": [example.completions[0] for example in encoded],
        "learns_end": [example.learns_end for example in encoded],
    }


def _describe(recipe: SFTRecipe) -> str:
    if recipe.targets == "answer":
        return "supervised fine-tuning on reference answers"
    if recipe.targets == "document":
        return "supervised fine-tuning on the first words of gold documents"
    return f"supervised fine-tuning on the {recipe.targets} completions of each state"


SFT = StoredAlgorithm(SFTRecipe, examples, make_trainer, _describe)
