"""`engine: tinker`: training on a server of the Tinker API, with leret's losses and the server's gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from leret.config.base import Settings
from leret.config.policy import PolicySettings
from leret.config.training import (
    ExampleRecipe,
    RoundRecipe,
    TrainingRecipe,
    WritingRecipe,
    changed_keys,
)
from leret.core.errors import PolicyError, TrainingError
from leret.core.files import write_atomically
from leret.core.runs import Run
from leret.core.types import digest
from leret.extras.tinker import (
    TINKER_RECORD,
    TinkerPolicy,
    TinkerPolicySettings,
    tinker_digest,
)
from leret.policies.checkpoints import refuse_changed_weights, sampled_settings
from leret.rollouts.rounds import Sampled, round_of
from leret.training.data import Encoded
from leret.training.driver import StepLoop
from leret.training.job import TrainingJob
from leret.training.model import LOAD, InitialPolicy, SavedPolicy, training_record
from leret.training.processes import N_PROCESSES, refuse_processes
from leret.training.rounds.grpo import GRPO, GRPOKeys
from leret.training.rounds.learner import Objective
from leret.training.rounds.loop import RoundLoop
from leret.training.rounds.rloo import RLOO, RLOORecipe
from leret.training.rounds.update import Forward, RolloutBatch, make_schedule
from leret.training.rounds.writing import WriterLearner, check_decoding
from leret.training.stored.preference import DPO, IPO, DPORecipe, IPORecipe, pair_terms
from leret.training.stored.sft import SFT, SFTRecipe
from leret.training.stored.trainer import StoredAlgorithm
from leret.training.validation import Validation

Ids = Sequence[int]
Terms = Callable[[list[Tensor]], dict[str, Tensor]]
"""A function of the completions' log-probabilities that returns ``loss``, which is minimized, and
logged figures."""


class TinkerKeys(Settings):
    """Checks for ``engine: tinker``, which trains LoRA adapters with AdamW on log-probabilities of tokens."""

    in_one_process: ClassVar[bool] = True

    @model_validator(mode="after")
    def _fits_the_server(self) -> TinkerKeys:
        recipe: Any = self
        keys = ("optim", "dtype", "served", "entropy_coef", "importance_clip")
        names = [name for name in keys if name in type(self).model_fields]
        wrong = changed_keys(self, names)
        if wrong:
            raise ValueError(
                f"engine tinker has no {' or '.join(wrong)}; remove it, or remove engine"
            )
        if recipe.lora is None or changed_keys(
            recipe.lora, ("alpha", "target_modules", "quantization")
        ):
            raise ValueError(
                "engine tinker trains a LoRA adapter; set lora: {r: 16} and no other keys of lora"
            )
        several = isinstance(self, RoundRecipe) and self.num_iterations * self.num_mini_batches > 1
        if several and (recipe.algorithm != "grpo" or recipe.beta):
            raise ValueError(
                "engine tinker takes one step per round, except for grpo without beta, because the server clips the "
                "ratio of each token; set num_iterations and num_mini_batches to 1"
            )
        return self


class TinkerGRPO(TinkerKeys, GRPOKeys, WritingRecipe):
    """GRPO on a server."""

    engine: Literal["tinker"] = "tinker"


class TinkerRLOO(TinkerKeys, RLOORecipe):
    """REINFORCE leave-one-out on a server."""

    engine: Literal["tinker"] = "tinker"  # type: ignore[assignment]


class TinkerSFT(TinkerKeys, SFTRecipe):
    """Supervised fine-tuning on a server."""

    engine: Literal["tinker"] = "tinker"  # type: ignore[assignment]


class TinkerDPO(TinkerKeys, DPORecipe):
    """Direct preference optimization on a server."""

    engine: Literal["tinker"] = "tinker"  # type: ignore[assignment]


class TinkerIPO(TinkerKeys, IPORecipe):
    """Identity preference optimization on a server."""

    engine: Literal["tinker"] = "tinker"  # type: ignore[assignment]


def find_tinker(run: Run, recipe: TrainingRecipe) -> InitialPolicy:
    """Return the initial policy for ``engine: tinker``: the run's base model, or a policy that a server trained.

    Its directory holds no weights, and for a base model it is the model's name.
    """
    settings = PolicySettings.model_validate(sampled_settings(run, recipe.predictors))
    paths = (run.policies / recipe.init_from, Path(recipe.init_from))
    trained = next((path.resolve() for path in paths if (path / TINKER_RECORD).is_file()), None)
    if not isinstance(settings, TinkerPolicySettings):
        raise TrainingError(
            f"engine: tinker needs a run with policy.kind tinker, not {settings.kind}; remove "
            "engine"
        )
    if trained is None and recipe.init_from != "base":
        raise TrainingError(
            f"init_from: {recipe.init_from!r} was not trained with engine: tinker; use base"
        )
    directory = trained or Path(settings.model)
    refuse_changed_weights(directory)
    digest = tinker_digest(settings.model_copy(update={"model": str(directory)}))
    return InitialPolicy(
        recipe.init_from, directory, digest, int(training_record(directory).get("total_steps", 0))
    )


class TinkerAdapter:
    """A LoRA adapter in training on a server, with its learning rate schedule.

    ``policy`` samples from the current weights. Checkpoints are on the server; their paths are
    stored here.
    """

    def __init__(
        self, sampled: PolicySettings, initial: InitialPolicy, recipe: Any, n_steps: int
    ) -> None:
        if N_PROCESSES > 1:
            refuse_processes(recipe)
        settings: Any = sampled.in_process(str(initial.directory))
        self.policy = TinkerPolicy(
            settings, lambda: self._call(self._client.save_weights_and_get_sampling_client)
        )
        self._recipe = recipe
        self._server = self.policy.connect()
        self._call = self._server.call
        rate = torch.optim.SGD([torch.zeros(1)], lr=recipe.learning_rate)
        self.schedule = make_schedule(recipe, rate, n_steps)
        rate.step()  # a schedule warns if its optimizer has not stepped

    @cached_property
    def _client(self) -> Any:
        service = self._server.service
        record = self.policy.record
        path = record.get("weights")
        if path:
            return self._call(service.create_training_client_from_state, path)
        recipe = self._recipe
        base_model = record["base_model"]
        create = service.create_lora_training_client
        return self._call(create, base_model, recipe.lora.r, recipe.seed)

    @cached_property
    def _reference(self) -> Any:
        return self.policy.initial_sampler()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def step(
        self,
        sequences: Sequence[tuple[Ids, Ids]],
        terms: Terms,
        loss: str | None = None,
        at: Sequence[Tensor] | None = None,
        **settings: float,
    ) -> dict[str, float]:
        """Take one optimizer step on the loss in ``terms``.

        Return the terms, computed before the step.

        Args:
            sequences: prompts with completions.
            terms: computes the loss and the logged figures from the log-probabilities of each
                completion's tokens.
            loss: loss of the API with the same gradient: ``cross_entropy`` (linear loss), or one on
                ratios to ``at``. None: the client asks for the log-probabilities first, and sends
                the gradient of ``terms``.
            at: log-probabilities of the completions' tokens when they were sampled.
            settings: settings of the API's loss.

        Raises:
            TrainingError: a log-probability is not finite.
        """
        types = self._server.types
        adam = types.AdamParams(
            learning_rate=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,  # as in leret's loop
            weight_decay=self._recipe.weight_decay,
            grad_clip_norm=self._recipe.max_grad_norm,
        )
        inputs: list[dict[str, Tensor]] = [{} for _ in sequences]
        if loss:
            inputs = _loss_inputs(sequences, terms, at)
        data = []
        for (prompt, completion), row in zip(sequences, inputs, strict=True):
            data.append(_datum(types, prompt, completion, row))

        def custom(_: Any, values: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
            return terms(_at_completions(values, sequences))["loss"], {}

        with self._server.errors():
            if loss is None:
                gradient = self._client.forward_backward_custom(data, custom)
            else:
                gradient = self._client.forward_backward(data, loss, settings or None)
            futures = [gradient, self._client.optim_step(adam)]
            output, _ = [future.result(self._server.timeout_s) for future in futures]
        values = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
        logps = _at_completions(values, sequences)
        if not all(row.isfinite().all() for row in logps):
            raise TrainingError(
                f"{self._server.url}: some log-probabilities are not finite; lower learning_rate"
            )
        return {name: float(term) for name, term in terms(logps).items()}

    def initial_logps(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[Tensor]:
        """Return the log-probabilities of each completion's tokens under the initial weights."""
        types = self._server.types
        futures = []
        with self._server.errors():
            for prompt, completion in sequences:
                model_input = types.ModelInput.from_ints([*prompt, *completion])
                futures.append(self._reference.compute_logprobs(model_input))
            answers = [future.result(self._server.timeout_s) for future in futures]
        logps = []
        for row, (_, completion) in zip(answers, sequences, strict=True):
            logps.append(torch.tensor(row[-len(completion) :]))
        return logps

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
                f"the checkpoint {state['weights']} of {directory} cannot be loaded ({error}); use "
                f"the server that saved it, or remove {directory.parent} to train again from the "
                "start"
            ) from error
        self.schedule.load_state_dict(state["schedule"])

    def save(self, directory: Path) -> SavedPolicy:
        base = self.policy.record["base_model"]
        record = {
            "base_model": base,
            "weights": self._call(self._client.save_state, "final").path,
            "sampler_weights": self._call(self._client.save_weights_for_sampler, "final").path,
        }
        directory.mkdir(parents=True, exist_ok=True)
        self.policy.tokenizer.save_pretrained(directory)
        GenerationConfig(eos_token_id=self.policy.ends).save_pretrained(directory)
        write_atomically(directory / TINKER_RECORD, json.dumps(record, indent=1))
        use = (
            f"Its weights are on the server that trained it; `tinker.json` has their paths. {LOAD}"
        )
        return SavedPolicy(base, "tinker", use=use)


def _at_completions(values: Sequence[Tensor], sequences: Sequence[tuple[Ids, Ids]]) -> list[Tensor]:
    rows = []
    for row, (_, completion) in zip(values, sequences, strict=True):
        rows.append(row[-len(completion) :])
    return rows


def _datum(types: Any, prompt: Ids, completion: Ids, inputs: Mapping[str, Tensor]) -> Any:
    ids = [*prompt, *completion]
    before = torch.zeros(len(prompt) - 1)
    values = {name: torch.cat([before, value]) for name, value in inputs.items()}
    values["target_tokens"] = torch.tensor(ids[1:])
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=values)


def _loss_inputs(
    sequences: Sequence[tuple[Ids, Ids]], terms: Terms, at: Sequence[Tensor] | None
) -> list[dict[str, Tensor]]:
    """Return each completion's inputs of an API loss with the gradient of ``terms`` at ``at``."""
    if at is None:
        points = [torch.zeros(len(completion)) for _, completion in sequences]
    else:
        points = [row.clone() for row in at]
    loss = terms([row.requires_grad_() for row in points])["loss"]
    gains = [-gradient for gradient in torch.autograd.grad(loss, points)]
    if at is None:
        return [{"weights": gain} for gain in gains]
    return [{"logprobs": row, "advantages": gain} for row, gain in zip(at, gains, strict=True)]


class TinkerUpdate:
    """Takes optimizer steps on a server.

    It has the methods of `leret.training.rounds.update.Update` that rounds need.

    The API's losses sum ``-ratio * advantage`` over tokens (``ppo`` clips the ratio). The
    advantages sent to them are minus the gradient of leret's loss with respect to the
    log-probabilities, at the sampler's. There, both losses have the same gradient with respect to
    the weights.
    """

    device = torch.device("cpu")

    def __init__(self, adapter: TinkerAdapter, recipe: Any, objective: Objective) -> None:
        self._adapter = adapter
        self._recipe = recipe
        self._objective = objective
        self.reference = adapter if recipe.beta else None

    def evaluate(self, batch: RolloutBatch, *, reference: bool = False) -> tuple[Tensor, None]:
        """Return each token's log-probability under the initial policy."""
        return _table(self._adapter.initial_logps(batch.sequences), batch), None

    def mismatch(self) -> dict[str, float]:
        """Return nothing: the log-probabilities before a step are the sampler's."""
        return {}

    def step(
        self, batch: RolloutBatch, beta: float = 0.0, round_tokens: float | None = None
    ) -> dict[str, float]:
        """Take one optimizer step.

        Return leret's loss and its terms, from the server's log-probabilities.
        """
        recipe = self._recipe
        counted = batch.counted(round_tokens, bool(beta))
        if counted is None or counted.old_logps is None:
            return {}

        def terms(logps: list[Tensor]) -> dict[str, Tensor]:
            now = Forward(torch.empty(0), _table(logps, counted), None)
            return self._objective.loss(recipe, counted, now, beta)

        at = []
        for row, (_, completion) in zip(counted.old_logps, counted.sequences, strict=True):
            at.append(row[: len(completion)])
        if recipe.num_iterations * recipe.num_mini_batches == 1:
            return self._adapter.step(counted.sequences, terms, "importance_sampling", at)
        high = recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high
        bounds = {"clip_low_threshold": 1 - recipe.epsilon, "clip_high_threshold": 1 + high}
        return self._adapter.step(counted.sequences, terms, "ppo", at, **bounds)


def _table(logps: list[Tensor], batch: RolloutBatch) -> Tensor:
    return pad_sequence(logps, batch_first=True).to(batch.mask)


class TinkerLearner(WriterLearner):
    """Trains a writing policy on a server.

    The log-probabilities before an update are those of the sampler.
    """

    update: Any
    policy: Any

    def __init__(self, objective: Objective, job: TrainingJob, device: str) -> None:
        assert job.environment is not None
        recipe: Any = job.recipe
        sampled = job.environment.recipe.policy_of(recipe.predictors)
        self.temperature = recipe.temperature or sampled.temperature
        check_decoding("engine: tinker", self.temperature, recipe.top_p or sampled.top_p)
        self.recipe = recipe
        self.objective = objective
        self.predictors = recipe.predictors
        self.actors = (self,)
        self.adapter = TinkerAdapter(sampled, job.initial, recipe, recipe.n_steps(len(job.inputs)))
        self.policy = self.adapter.policy
        self._schedule = self.adapter.schedule
        self.update = TinkerUpdate(self.adapter, recipe, objective)

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        return self.adapter.validate(validation, step)

    def state(self, directory: Path) -> dict[str, Any]:
        return self.adapter.state(directory)

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.adapter.load_state(state, directory)

    def save(self, directory: Path) -> SavedPolicy:
        return self.adapter.save(directory)

    def _batch(self, sampled: Sampled) -> RolloutBatch:
        batch = RolloutBatch.of(sampled.sequences, sampled.groups)
        logps = [torch.tensor(row) for row in sampled.logps]
        return replace(batch, old_logps=_table(logps, batch))


class ExampleLoop(RoundLoop):
    """Engine that trains on stored examples.

    Args:
        encode: returns the examples that fit, for a tokenizer, its end tokens and the model's
            maximum length.
        pair_terms: computes the loss and the other logged figures of pairs, as
            `leret.training.stored.preference.pair_terms`. None: the loss is the mean over a
            step's target tokens.
    """

    def __init__(
        self,
        job: TrainingJob,
        encode: Callable[[Any, Ids, int | None], list[Encoded]],
        pair_terms: Callable[..., dict[str, Tensor]] | None,
    ) -> None:
        if job.run is None:
            raise TrainingError("engine: tinker needs a run of `leret sample`; remove engine")
        recipe: Any = job.recipe
        self.recipe = recipe
        self.sampler = None
        self._device = "cpu"
        self._directory = job.directory.path
        sampled = PolicySettings.model_validate(sampled_settings(job.run, recipe.predictors))
        n = recipe.n_steps(len(job.inputs)) if job.max_steps is None else job.max_steps
        self.learner: Any = TinkerAdapter(sampled, job.initial, recipe, n)
        policy = self.learner.policy
        self.tasks: Any = encode(policy.tokenizer, policy.ends, policy.encoder.n_positions)
        self.examples = len(self.tasks)
        self.dropped = len(job.inputs) - self.examples
        self._pair_terms = pair_terms
        self._references: dict[int, Tensor] = {}
        per_step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
        self.size = min(per_step, self.examples)
        StepLoop.__init__(self, self._directory, recipe.logging_steps, recipe.save_steps, n)

    @property
    def steps(self) -> int:
        return int(self.state.global_step)

    def _round(self) -> dict[str, float]:
        rate = self.learner.learning_rate
        figures = self._step(round_of(self.examples, self.size, self.recipe.seed, self.steps))
        self.learner.schedule.step()
        return {**figures, "learning_rate": rate}

    def _step(self, indices: Sequence[int]) -> dict[str, float]:
        rows = [self.tasks[i] for i in indices]
        sequences = _sequences(rows)
        if self._pair_terms is None:
            mean = partial(_mean_loss, rows)
            return dict(self.learner.step(sequences, mean, "cross_entropy"))
        references = torch.stack(self._reference_logps(indices), dim=1)
        gains = [row.gain for row in rows]
        terms = partial(self._pair_terms, self.recipe, references=references, gains=gains)
        return dict(self.learner.step(sequences, lambda logps: terms((logps[::2], logps[1::2]))))

    def _reference_logps(self, indices: Sequence[int]) -> list[Tensor]:
        """Return summed log-probabilities of pairs under the initial weights, computed once."""
        new = [i for i in indices if i not in self._references]
        if new:
            logps = self.learner.initial_logps(_sequences([self.tasks[i] for i in new]))
            sums = torch.stack([row.sum() for row in logps]).view(-1, 2)
            self._references.update(zip(new, sums, strict=True))
        return [self._references[i] for i in indices]


def _mean_loss(rows: Sequence[Encoded], logps: list[Tensor]) -> dict[str, Tensor]:
    """Return the negative mean over the target tokens of a step."""
    learnt = []
    for logp, row in zip(logps, rows, strict=True):
        learnt.append(logp if row.learns_end else logp[:-1])
    return {"loss": -torch.cat(learnt).mean()}


def _sequences(examples: Sequence[Encoded]) -> list[tuple[Ids, Ids]]:
    sequences: list[tuple[Ids, Ids]] = []
    for example in examples:
        sequences += [(example.prompt, completion) for completion in example.completions]
    return sequences


@dataclass(frozen=True, slots=True)
class TinkerExamples(StoredAlgorithm):
    """An algorithm on stored samples whose steps a server takes.

    ``pair_terms`` is that of `ExampleLoop`.
    """

    pair_terms: Callable[..., dict[str, Tensor]] | None = None

    @contextmanager
    def engine(self, job: TrainingJob, device: str) -> Iterator[ExampleLoop]:
        yield ExampleLoop(job, partial(self.encode, job), self.pair_terms)


def _stored(
    algorithm: StoredAlgorithm,
    settings: type[ExampleRecipe],
    terms: Callable[..., dict[str, Tensor]] | None = None,
) -> TinkerExamples:
    return TinkerExamples(
        settings,
        algorithm.examples,
        algorithm.make_trainer,
        algorithm.describe,
        find_tinker,
        terms,
    )


ENGINE = {
    "grpo": replace(GRPO, settings=TinkerGRPO, learner=TinkerLearner, find_initial=find_tinker),
    "rloo": replace(RLOO, settings=TinkerRLOO, learner=TinkerLearner, find_initial=find_tinker),
    "sft": _stored(SFT, TinkerSFT),
    "dpo": _stored(DPO, TinkerDPO, pair_terms),
    "ipo": _stored(IPO, TinkerIPO, pair_terms),
}
"""`engine: tinker` by algorithm."""
