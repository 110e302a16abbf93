"""Checks before the first step, for faults that would silently train the wrong thing.

They notice leaked evaluation tasks, a wrong loss of the trainer, and prompts that differ from those that were sent:
another program, adapter, chat template or tokenizer, or an edited file of preferences.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from leret.config.training import ExampleRecipe
from leret.core.errors import LeretError, TrainingError
from leret.core.runs import Run, program_digest, versions
from leret.policies.base import Messages
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.serving.model import sampled_settings
from leret.training.data import Encoded, TokenEncoder, TrainingExample, plain
from leret.training.model import InitialPolicy

if TYPE_CHECKING:
    from leret.rollouts.environment import Environment
    from leret.sampling.store.schema import StateSamples

_ROWS = 4
_SMALL = 1 << 20
_STATES = 8
_EXAMPLES = 16


def refuse_leaks(run: Run, task_ids: Iterable[str]) -> None:
    """Refuse tasks that evaluation holds out, by their ids or their texts, as sampling noted them."""
    if not run.held_out.is_file():
        raise TrainingError(f"{run.held_out} is missing, which lists the tasks of evaluation; `leret sample` writes it")
    held_out = set(json.loads(run.held_out.read_text(encoding="utf-8")))
    leaked = sorted(held_out.intersection(task_ids))
    if leaked:
        raise TrainingError(
            f"{len(leaked)} questions of the training data, or their texts, are in the evaluation split: "
            f"{', '.join(map(repr, leaked[:5]))}; sample a new run from split train"
        )


def check_loss(trainer: Any, recipe: ExampleRecipe, oracle_loss: Callable[..., float]) -> float | None:
    """Compare the trainer's loss with the oracle's, on weights that differ from the reference.

    TRL multiplies the last hidden state by the output matrix itself. For a model with a larger head its
    log-probabilities are wrong, and yet the loss of DPO and IPO is right at the first step. Return the difference, as a
    fraction of the loss or of 1, whichever is larger; None under ZeRO-3, which shards the weights between steps.
    """
    import torch
    from accelerate.utils import send_to_device
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return None

    model, data = trainer.model, trainer.train_dataset
    lengths = [sum(len(value) for value in row.values() if isinstance(value, list)) for row in data]
    shortest = sorted(range(len(data)), key=lengths.__getitem__)
    rows = [data[i] for i in shortest[:_ROWS]]
    batch = send_to_device(trainer.data_collator(rows), next(model.parameters()).device)
    model.eval()
    try:
        with torch.no_grad(), _moved(model):
            computed = float(trainer.compute_loss(model, dict(batch)))
            expected = oracle_loss(recipe, model, rows)
    finally:
        model.train()
    difference = abs(computed - expected) / max(1.0, abs(expected))
    if not difference <= (1e-4 if recipe.dtype == "float32" else 5e-2):
        raise TrainingError(
            f"TRL computes a loss of {computed:.6g} for {type(model).__name__} where the model itself gives "
            f"{expected:.6g}: its log-probabilities are not the last hidden state times one output matrix. Use an "
            "architecture with such a head (Llama, Qwen, OPT ...)"
        )
    return difference


@contextmanager
def _moved(model: Any) -> Iterator[None]:
    """Add noise to the weights inside the block: to all small ones, and to all outside the backbone."""
    import torch

    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    backbone = {id(parameter) for parameter in inner.base_model.parameters()}
    noise = torch.Generator().manual_seed(0)
    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for parameter in model.parameters():
        if not parameter.is_floating_point() or (parameter.numel() > _SMALL and id(parameter) in backbone):
            continue  # not a floating-point number: quantized
        before.append((parameter, parameter.detach().clone()))
        scale = 0.05 + 0.1 * float(parameter.detach().float().abs().mean())
        step = torch.randn(parameter.shape, generator=noise) * scale
        parameter.data.add_(step.to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.data.copy_(value)


def check_parity(
    run: Run,
    environment: Environment,
    initial: InitialPolicy,
    examples: Sequence[TrainingExample],
    encoder: TokenEncoder,
    encoded: Sequence[Encoded],
    predictors: Collection[str] | None = None,
) -> None:
    """Compare some examples with the prompts that were sent; a `TrainingError` shows the first difference."""
    check_ids(examples, encoder, encoded)
    if not run.store.is_file():
        return
    from leret.sampling.store.store import Store

    with Store(run.store, read_only=True) as store:
        groups = store.groups(run.manifest.policy_digest)
        trained = (group for group in groups if predictors is None or group.state.predictor in predictors)
        states = list(islice(trained, _STATES))
    _check_counts(sampled_settings(run, predictors), initial, encoder, states)
    _check_examples(run, states, examples)
    _check_program(run, environment, states)


def check_ids(examples: Sequence[TrainingExample], encoder: TokenEncoder, encoded: Sequence[Encoded]) -> None:
    """Compare the ids of some prompts with the sampler's; a `TrainingError` shows the first difference."""
    engine = PromptEncoder(encoder.tokenizer, None, str(encoder.tokenizer.name_or_path), encoder.enable_thinking)
    for index in range(0, len(examples), max(1, len(examples) // _EXAMPLES)):
        ours, theirs = encoded[index].prompt, list(engine.encode(examples[index].prompt).token_ids)
        if ours != theirs:
            shorter = min(len(ours), len(theirs))
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), shorter)
            raise TrainingError(
                f"question {examples[index].task_id}: the prompts of training and sampling differ from token {place} "
                "on:\n"
                f"  training: {_tokens(encoder.tokenizer, ours, place)}\n"
                f"  sampling: {_tokens(encoder.tokenizer, theirs, place)}\n"
                "The chat template must render the same text, and the tokenizer encode it to the same ids, both times; "
                f"correct the tokenizer of {encoder.tokenizer.name_or_path}"
            )


def _check_counts(
    settings: Mapping[str, Any], initial: InitialPolicy, encoder: TokenEncoder, states: Sequence[StateSamples]
) -> None:
    """Compare the tokens that the sampler counted in zero-shot prompts, if it was the same model."""
    served = str(settings.get("model", "")).rstrip("/").rpartition("/")[2]
    if initial.name != "base" and served != initial.directory.name:
        return  # another model has another tokenizer
    for group in states:
        state, ids = group.state, encoder.prompt_ids(plain(group.state.messages))
        counts = {sample.n_prompt_tokens for sample in group.samples if sample.prompt == "0"}
        other = sorted(n for n in counts if n is not None and n != len(ids))
        if other:
            raise TrainingError(
                f"question {state.task_id}, step {state.step}: the sampler counted {other[0]} tokens in the "
                f"zero-shot prompt; {initial.directory} makes {len(ids)} of the same messages:\n"
                f"  {_tokens(encoder.tokenizer, ids, 0)}\n  ... {_tokens(encoder.tokenizer, ids, len(ids))}\n"
                "The server must use the same tokenizer and chat template; serve the model with them, and sample again"
            )


def _check_examples(run: Run, states: Sequence[StateSamples], examples: Sequence[TrainingExample]) -> None:
    from leret.programs.checks import message_difference

    known: dict[str, list[Messages]] = defaultdict(list)
    for group in states:
        known[group.state.task_id].append(plain(group.state.messages))
    if len(states) == _STATES:
        del known[states[-1].state.task_id]  # it may have further states
    for example in examples:
        sent, trained = known.get(example.task_id), example.prompt
        if sent and trained not in sent:
            raise TrainingError(
                f"question {example.task_id}: the prompt of the training is not the one that was sent:\n"
                f"{message_difference(trained, sent[0], ('trained', 'sent'))}\n"
                f"{run.preferences} was not made from this run's samples; `leret pairs --run {run.path}` rebuilds it"
            )


def _check_program(run: Run, environment: Environment, states: Sequence[StateSamples]) -> None:
    """Check that the program sends the sampled messages; the same program under the same versions does."""
    from leret.programs.checks import message_difference

    manifest = run.manifest
    program, sampled = (manifest.sampling or {}).get("program"), manifest.digests.get("program")
    try:
        if program and manifest.versions == versions() and program_digest(program) == sampled:
            return
        formatter = environment.formatter
    except (LeretError, OSError) as error:
        return run.event("train", "messages not checked", why=str(error))
    for state in (group.state for group in states if group.state.predictor not in formatter.picks):
        try:
            today = plain(formatter.messages(formatter.need(state.predictor, state.inputs)))
        except KeyError:
            raise TrainingError(
                f"question {state.task_id}: the program no longer has the predictor {state.predictor!r}, which was "
                "sampled; restore the program, or sample a new run with this one"
            ) from None
        if today != plain(state.messages):
            raise TrainingError(
                f"question {state.task_id}, step {state.step}: the program no longer sends the sampled messages:\n"
                f"{message_difference(plain(state.messages), today, ('sampled', 'today'))}\n"
                "A policy trained on these prompts would get others. Restore the program and its adapter, or sample a "
                "new run with these"
            )


def _tokens(tokenizer: Any, ids: Sequence[int], place: int) -> str:
    start = max(0, place - 5)
    return f"{'...' if start else ''}{tokenizer.decode(list(ids[start : place + 12]))!r} {list(ids[start : place + 6])}"
