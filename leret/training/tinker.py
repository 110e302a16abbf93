"""Training on a server of the Tinker API (``engine: tinker``): the adapter there, and the loop over stored examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from leret.config.policy import PolicySettings
from leret.core.errors import PolicyError, TrainingError
from leret.core.files import write_atomically
from leret.core.types import digest
from leret.policies.checkpoints import TINKER_RECORD, sampled_settings
from leret.policies.remote.tinker import TinkerPolicy
from leret.rollouts.rounds import round_of
from leret.training.driver import StepLoop
from leret.training.model import InitialPolicy
from leret.training.online.loop import RoundLoop
from leret.training.online.update import make_schedule
from leret.training.processes import refuse_processes
from leret.training.validation import Validation

if TYPE_CHECKING:
    from leret.training.data import Encoded
    from leret.training.job import TrainingJob

Ids = Sequence[int]
Row = tuple[Ids, Ids, Mapping[str, Any]]
"""A prompt, its completion, and inputs of a loss for the completion's tokens."""
Loss = Callable[[list[torch.Tensor]], torch.Tensor]


class TinkerAdapter:
    """A LoRA adapter in training on a server, with its learning rate schedule.

    ``policy`` samples from the current weights. Checkpoints are on the server; their paths are stored here.
    """

    def __init__(self, sampled: PolicySettings, initial: InitialPolicy, recipe: Any, n_steps: int) -> None:
        refuse_processes(recipe)
        settings: Any = sampled.in_process(str(initial.directory))
        self.policy = TinkerPolicy(settings, lambda: self._call(self._client.save_weights_and_get_sampling_client))
        self._server, self._recipe = self.policy.connect(), recipe
        self._call = self._server.call
        rate = torch.optim.SGD([torch.zeros(1)], lr=recipe.learning_rate)
        self.schedule = make_schedule(recipe, rate, n_steps)
        rate.step()  # a schedule warns if its optimizer has not stepped

    @cached_property
    def _client(self) -> Any:
        service, record = self._server.service, self.policy.record
        if path := record.get("weights"):
            return self._call(service.create_training_client_from_state, path)
        lora = (record["base_model"], self._recipe.lora.r, self._recipe.seed)
        return self._call(service.create_lora_training_client, *lora)

    @cached_property
    def _reference(self) -> Any:
        return self.policy.initial_sampler()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def step(self, rows: Sequence[Row], loss: str | Loss, **settings: float) -> list[torch.Tensor]:
        """Take one optimizer step; return the completions' earlier log-probabilities.

        The step is on the sum of a loss of the API, or on a function of the completions' log-probabilities. For a
        function, the client asks for the log-probabilities first, and sends the function's gradient.

        Raises:
            TrainingError: a log-probability is not finite.
        """
        types = self._server.types
        adam = types.AdamParams(
            learning_rate=self.learning_rate, beta1=0.9, beta2=0.999, eps=1e-8,  # as in leret's loop
            weight_decay=self._recipe.weight_decay, grad_clip_norm=self._recipe.max_grad_norm,
        )  # fmt: skip
        data = []
        for prompt, completion, inputs in rows:
            ids, before = [*prompt, *completion], torch.zeros(len(prompt) - 1)
            values = {name: torch.cat([before, torch.as_tensor(row)]) for name, row in inputs.items()}
            values["target_tokens"] = torch.tensor(ids[1:])
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=values))

        def completions(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [value[-len(completion) :] for value, (_, completion, _) in zip(values, rows, strict=True)]

        with self._server.errors():
            if callable(loss):
                custom: Any = lambda _, values: (loss(completions(values)), {})  # noqa: E731
                gradient = self._client.forward_backward_custom(data, custom)
            else:
                gradient = self._client.forward_backward(data, loss, settings or None)
            futures = [gradient, self._client.optim_step(adam)]
            output, _ = [future.result(self._server.timeout_s) for future in futures]
        logps = completions([one["logprobs"].to_torch() for one in output.loss_fn_outputs])
        if not all(row.isfinite().all() for row in logps):
            raise TrainingError(f"{self._server.url}: some log-probabilities are not finite; lower learning_rate")
        return logps

    def initial_logps(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[torch.Tensor]:
        """Return the log-probabilities of each completion's tokens under the initial weights."""
        ask, types = self._reference.compute_logprobs, self._server.types
        with self._server.errors():
            futures = [ask(types.ModelInput.from_ints([*prompt, *completion])) for prompt, completion in sequences]
            answers = [future.result(self._server.timeout_s) for future in futures]
        return [torch.tensor(row[-len(ids) :]) for row, (_, ids) in zip(answers, sequences, strict=True)]

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        self.policy.renew(digest("step", step))
        return validation.run_policy(self.policy)

    def state(self, directory: Path) -> dict[str, Any]:
        path = str(self._call(self._client.save_state, directory.name).path)
        return {"weights": path, "schedule": self.schedule.state_dict()}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        load = self._server.service.create_training_client_from_state_with_optimizer
        try:
            self._client = self._call(load, state["weights"])
        except PolicyError as error:
            raise TrainingError(
                f"the checkpoint {state['weights']} of {directory} cannot be loaded ({error}); use the server that "
                f"saved it, or remove {directory.parent} to train again from the start"
            ) from error
        self.schedule.load_state_dict(state["schedule"])

    def save(self, directory: Path) -> tuple[str, str]:
        names = {"weights": self._client.save_state, "sampler_weights": self._client.save_weights_for_sampler}
        paths = {name: self._call(save, "final").path for name, save in names.items()}
        base = self.policy.record["base_model"]
        directory.mkdir(parents=True, exist_ok=True)
        self.policy.tokenizer.save_pretrained(directory)
        GenerationConfig(eos_token_id=self.policy.ends).save_pretrained(directory)
        write_atomically(directory / TINKER_RECORD, json.dumps({"base_model": base, **paths}, indent=1))
        return base, "tinker"


class ExampleLoop(RoundLoop):
    """Engine that trains on stored examples; the loss of a step is the mean over its target tokens.

    ``encode`` returns the examples that fit, for a tokenizer, its end tokens and the model's maximum length.
    """

    def __init__(self, job: TrainingJob, encode: Callable[[Any, Ids, int | None], list[Encoded]]) -> None:
        if job.run is None:
            raise TrainingError("engine: tinker needs a run of `leret sample`; remove engine")
        recipe: Any = job.recipe
        self.recipe, self.sampler, self._device, self._directory = recipe, None, "cpu", job.directory.path
        sampled = PolicySettings.model_validate(sampled_settings(job.run, recipe.predictors))
        n = recipe.n_steps(len(job.inputs)) if job.max_steps is None else job.max_steps
        self.learner: Any = TinkerAdapter(sampled, job.initial, recipe, n)
        policy = self.learner.policy
        self.tasks: Any = encode(policy.tokenizer, policy.ends, policy.encoder.n_positions)
        self.examples, self.dropped = len(self.tasks), len(job.inputs) - len(self.tasks)
        self.size = min(recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps, self.examples)
        StepLoop.__init__(self, self._directory, recipe.logging_steps, recipe.save_steps, n)

    @property
    def steps(self) -> int:
        return int(self.state.global_step)

    def _round(self) -> dict[str, float]:
        adapter, rate = self.learner, self.learner.learning_rate
        figures = self._step(round_of(self.examples, self.size, self.recipe.seed, self.steps))
        adapter.schedule.step()
        return {**figures, "learning_rate": rate}

    def _step(self, places: Sequence[int]) -> dict[str, float]:
        rows = [(self.tasks[place].prompt, self.tasks[place].completions[0]) for place in places]
        n = sum(len(target) for _, target in rows)
        data = [(prompt, target, {"weights": torch.full((len(target),), 1 / n)}) for prompt, target in rows]
        return {"loss": -float(torch.cat(self.learner.step(data, "cross_entropy")).sum()) / n}


class PairLoop(ExampleLoop):
    """Engine that trains on stored pairs; the reference log-probabilities of a pair are computed in its first step.

    ``terms`` computes the loss and the other logged figures, as `leret.training.algorithms.preference.pair_terms`.
    """

    def __init__(self, job: TrainingJob, encode: Any, terms: Callable[..., dict[str, torch.Tensor]]) -> None:
        super().__init__(job, encode)
        self._terms, self._references = terms, dict[int, torch.Tensor]()

    def _step(self, places: Sequence[int]) -> dict[str, float]:
        adapter, pairs = self.learner, [self.tasks[place] for place in places]
        if new := [place for place in places if place not in self._references]:
            logps = adapter.initial_logps(_sequences([self.tasks[place] for place in new]))
            sums = torch.stack([row.sum() for row in logps]).view(-1, 2)
            self._references.update(zip(new, sums, strict=True))
        references = torch.stack([self._references[place] for place in places], dim=1)
        gains = [pair.gain for pair in pairs]

        def terms(logps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return self._terms(self.recipe, (logps[::2], logps[1::2]), references, gains)

        rows: list[Row] = [(prompt, ids, {}) for prompt, ids in _sequences(pairs)]
        logps = adapter.step(rows, lambda logps: terms(logps)["loss"])
        return {name: float(term) for name, term in terms(logps).items()}


def _sequences(pairs: Sequence[Encoded]) -> list[tuple[Ids, Ids]]:
    return [(pair.prompt, ids) for pair in pairs for ids in pair.completions]
