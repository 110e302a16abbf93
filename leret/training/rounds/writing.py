"""Online training of writing policies: advantages of a round's completions, and updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leret.config.policy import OpenAIPolicySettings, PolicySettings
from leret.core.aio import submit
from leret.core.errors import TrainingError
from leret.policies.base import Completion, Messages, Request
from leret.policies.checkpoints import positions
from leret.policies.local.chat_template import PromptEncoder, end_token
from leret.policies.local.model import stop_ids
from leret.policies.local.policy import LocalPolicy
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.model import refresh, resolve_policy
from leret.policies.tool_calls import read_calls
from leret.rollouts.environment import Environment
from leret.rollouts.rounds import Sampled
from leret.training.job import TrainingJob
from leret.training.model import SavedPolicy, library_of, save_policy
from leret.training.processes import from_main
from leret.training.rounds.advantages import (
    Comparison,
    group_statistics,
    step_indices,
)
from leret.training.rounds.learner import Objective
from leret.training.rounds.losses import KL, importance_weights
from leret.training.rounds.update import (
    LOGGED,
    Ids,
    Reference,
    RolloutBatch,
    Update,
    load_trainable,
    make_schedule,
)
from leret.training.validation import Validation


class WriterLearner:
    """Trains a writing policy; `temperature` and `learning_rate` apply to the next round.

    ``score`` returns the log-probabilities of completions under a teacher outside this process.
    """

    sampling_keys: Mapping[str, Mapping[str, Any]] = {}

    def __init__(self, objective: Objective, job: TrainingJob, device: str) -> None:
        assert job.environment is not None
        recipe: Any = job.recipe
        self.recipe = recipe
        self.objective = objective
        self.predictors = recipe.predictors
        self.actors = (self,)
        self.score: Callable[[Sequence[tuple[Ids, Ids]]], list[list[float]]] | None = None
        self._initial = job.initial
        self.model, self.tokenizer = load_trainable(job.initial, recipe.lora, recipe.dtype, device)
        reference = Reference(self.model, job.initial, recipe.lora) if recipe.beta else None
        sampled = job.environment.recipe.policy_of(recipe.predictors)
        self.temperature = recipe.temperature or sampled.temperature
        if recipe.importance_clip is not None:
            check_decoding("importance_clip", self.temperature, recipe.top_p or sampled.top_p)
        self.policy = self._live_policy(sampled, job.environment)
        self.update = Update(
            self.model,
            self.tokenizer.pad_token_id,
            recipe,
            objective,
            temperature=self.temperature,
            reference=reference,
        )
        self._schedule = make_schedule(
            recipe, self.update.optimizer, recipe.n_steps(len(job.inputs))
        )

    def _live_policy(
        self, sampled: PolicySettings, environment: Environment
    ) -> LocalPolicy | ServedPolicy:
        identity = {"name": self.recipe.policy_name, "digest": self._initial.digest}
        if not self.recipe.served:
            thinking = getattr(sampled, "enable_thinking", None)
            return LocalPolicy.over(
                self.model, self.tokenizer, enable_thinking=thinking, **identity
            )
        if not isinstance(sampled, OpenAIPolicySettings):
            raise TrainingError(
                f"served: needs a run with policy kind openai, not {sampled.kind}; remove served"
            )
        if sampled.grammar:
            raise TrainingError(
                f"served: policy.extra_body has {', '.join(sampled.grammar)}: the server samples "
                "from the distribution that this grammar masks, and the ratios of the training "
                "would not be of that distribution; remove served, or use program.adapter.prefill "
                "instead of a grammar"
            )
        directory = environment.cache / f"served-{self.recipe.policy_name}"
        return ServedPolicy(sampled, self.model, self.tokenizer, directory, **identity)

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        recipe = self.recipe
        batch = self._batch(sampled)
        if self.update.reference is not None:
            logps, _ = self.update.evaluate(batch, reference=True)
            batch = replace(batch, reference=logps)
        batch = self._weighted(self.objective.advantages(recipe, sampled, batch, recipe.beta))
        return self._log_figures(sampled, batch, self._steps(batch, number))

    def _steps(self, batch: RolloutBatch, number: int) -> list[dict[str, float]]:
        """Take the optimizer steps of a round; return their figures."""
        recipe = self.recipe
        loss_beta = 0.0 if self.objective.penalty == "reward" else recipe.beta
        round_tokens = float(batch.mask.sum()) / recipe.num_mini_batches
        steps = []
        for index in step_indices(recipe, batch.groups, number):
            figures = self.update.step(batch.rows(index), loss_beta, round_tokens)
            if figures:
                steps.append(figures)
                self._schedule.step()
        return steps

    def _batch(self, sampled: Sampled) -> RolloutBatch:
        """Return a round's completions, with log-probabilities and values where they are needed."""
        recipe = self.recipe
        objective = self.objective
        groups = sampled.groups.to(self.update.device)
        batch = RolloutBatch.of(sampled.sequences, groups, sampled.logps)
        if sampled.teacher_prompts:
            batch = replace(batch, teacher_prompts=list(sampled.teacher_prompts))
        if self.score is not None:
            scores = from_main(partial(self.score, batch.after_teacher_prompts()))
            batch = replace(batch, teacher_logps=batch.table(scores))
        has_several_steps = recipe.num_iterations * recipe.num_mini_batches > 1
        reads_logps = recipe.importance_clip is not None or objective.penalty == "reward"
        if has_several_steps or reads_logps or objective.has_values:
            logps, values = self.update.evaluate(batch)
            batch = replace(batch, old_logps=logps, values=values)
        return batch

    def _weighted(self, batch: RolloutBatch) -> RolloutBatch:
        """Multiply the advantages by the importance weights of ``importance_clip``."""
        clip = self.recipe.importance_clip
        if clip is None:
            return batch
        if batch.sampler_logps is None or batch.old_logps is None:
            raise TrainingError(
                "importance_clip: the server sends no log-probabilities of the sampled tokens; "
                "use one that does, such as vLLM, or remove importance_clip"
            )
        difference = batch.sampler_difference(batch.old_logps)
        weights = importance_weights(difference, batch.mask, clip, self.objective.level)
        if batch.imitation is not None:
            batch = replace(batch, imitation=batch.imitation * weights)
        return replace(batch, advantages=batch.advantages * weights)

    def _log_figures(
        self,
        sampled: Sampled,
        batch: RolloutBatch,
        steps: Sequence[Mapping[str, float]],
    ) -> dict[str, float]:
        """Return a round's figures for the log."""
        figures = group_statistics(*Comparison.of(sampled).distinct(sampled.rewards))
        figures |= self.update.mismatch()
        for name in steps[0] if steps else ():
            figures[LOGGED.get(name, name)] = sum(step[name] for step in steps) / len(steps)
        if batch.reference is not None and batch.old_logps is not None:
            estimate = KL[self.recipe.kl_estimator](batch.old_logps, batch.reference)
            per_completion = (estimate * batch.mask).sum(1)
            length = float(batch.mask.sum(1).mean())
            figures["kl"] = float(per_completion.mean()) / length
        return figures

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        return validation.run_model(self.model, self.tokenizer, step)

    def state(self, directory: Path) -> dict[str, Any]:
        parameters = self.update.trainable_parameters()
        return {
            "weights": {name: weight.detach() for name, weight in parameters.items()},
            "optimizer": self.update.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        with torch.no_grad():
            for name, weight in self.update.trainable_parameters().items():
                weight.copy_(state["weights"][name])
        self.update.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def save(self, directory: Path) -> SavedPolicy:
        save_policy(self.model, self.tokenizer, directory)
        return SavedPolicy(self._initial.base_model, library_of(self.model))


def check_decoding(key: str, temperature: float, top_p: float) -> None:
    """Raise TrainingError unless completions are drawn with temperature 1 and top_p 1."""
    if (temperature, top_p) != (1, 1):
        raise TrainingError(
            f"temperature {temperature:g}, top_p {top_p:g}: {key} computes log-probabilities for "
            "temperature 1 and top_p 1; set both to 1"
        )


class ServedPolicy:
    """Samples a round's completions on the run's servers.

    It has the `LocalPolicy` methods that rounds need.

    The servers load the current adapter before each round.

    Args:
        settings: settings of the servers, which serve the adapter's base model.
        model: peft model in training.
        tokenizer: tokenizer with the servers' chat template.
        directory: folder from which the servers read the adapter.
        name: policy name in reports.
        digest: digest of the current weights.
    """

    def __init__(
        self,
        settings: OpenAIPolicySettings,
        model: Any,
        tokenizer: Any,
        directory: Path,
        *,
        name: str,
        digest: str,
    ) -> None:
        self.name = name
        self.digest = digest
        self._model = model
        self._tokenizer = tokenizer
        self._directory = directory
        # With log-probabilities, servers send token ids too.
        self._settings = settings.model_copy(update={"logprobs": True})
        self._encoder = PromptEncoder(tokenizer, positions(model), name, settings.enable_thinking)
        self._ends = stop_ids(model.generation_config)
        self._end = end_token(tokenizer, self._ends)
        self._encoder.set_ends(self._ends)

    def renew(self, digest: str) -> None:
        """Load the current weights, with digest ``digest``, on the servers.

        Raise `PolicyError` if a server fails.
        """
        self.digest = digest
        save_policy(self._model, self._tokenizer, self._directory)
        directory = str(self._directory)
        self._settings = refresh(self._settings, resolve_policy(directory), directory)

    def prompt_ids(self, messages: Messages, n_completion: int = 1) -> tuple[int, ...]:
        """Return prompt ids.

        Raise `PromptTooLongError` if a completion of ``n_completion`` tokens does not fit.
        """
        return self._encoder.encode(messages, n_completion).token_ids

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        return submit(self._complete(requests)).result()

    def close(self) -> None:
        """Do nothing: no connection stays open between rounds."""

    async def _complete(
        self, requests: Sequence[Request]
    ) -> list[list[Completion] | BaseException]:
        async with aclosing(OpenAIPolicy(self._settings)) as policy:
            answers = await asyncio.gather(*map(policy.complete, requests), return_exceptions=True)
        checked: list[list[Completion] | BaseException] = []
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, BaseException):
                checked.append(answer)
            else:
                checked.append([self._with_ids(completion, request) for completion in answer])
        return checked

    def _with_ids(self, completion: Completion, request: Request) -> Completion:
        prompt = self._encoder.encode(request.messages)
        n = len(prompt.token_ids)
        if completion.n_prompt_tokens not in (0, n):
            raise TrainingError(
                f"{self._settings.urls[0]} counts {completion.n_prompt_tokens} prompt tokens where "
                f"leret counts {n}; serve the model with the tokenizer and chat template of the "
                "policy in training"
            )
        ids: Sequence[int] | None = completion.token_ids
        if not ids:
            ids = self._tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        if len(ids) > prompt.room:
            raise TrainingError(
                f"{self._settings.urls[0]} sent a completion of {len(ids)} tokens, but the model "
                f"has room for {prompt.room}; use a server that accepts max_tokens"
            )
        if request.messages[0].get("tools"):
            completion = self._as_written(completion)
        if completion.token_ids:
            self._check_ids(completion, completion.token_ids)
        if completion.finish_reason == "stop" and (not ids or ids[-1] not in self._ends):
            ids = [*ids, self._end]
        logprobs = None
        if completion.token_ids:  # otherwise the tokens are not the server's
            logprobs = completion.logprobs
        return replace(completion, token_ids=tuple(ids), logprobs=logprobs)

    def _as_written(self, completion: Completion) -> Completion:
        """Restore the text of tool calls from the token ids: the server's tool parser edits it."""
        calls = read_calls(completion.text)[1]
        if not calls:
            return completion
        if not completion.token_ids:
            raise TrainingError(
                f"{self._settings.urls[0]} sent tool calls without token ids, so leret cannot "
                "train on the sampled tokens; use a server with return_token_ids, such as vLLM"
            )
        text = self._encoder.to_text(completion.token_ids, special=True)
        if self._encoder.read_calls(text, ())[1] != calls:
            return completion
        return replace(completion, text=text)

    def _check_ids(self, completion: Completion, ids: Sequence[int]) -> None:
        """Raise `TrainingError` if the token ids do not match the completion's text."""
        n_logprobs = len(completion.logprobs or ids)
        if len(ids) == n_logprobs:
            size = self._model.get_input_embeddings().num_embeddings
            fault = self._encoder.fault_of(ids, completion.text, size)
        else:
            fault = f"{len(ids)} token ids and {n_logprobs} log-probabilities for one completion"
        if fault is None:
            return
        raise TrainingError(
            f"{self._settings.urls[0]} sent {fault}. Its tokenizer differs from the policy's, or "
            "it edits the text; serve it with the policy's tokenizer, no reasoning parser, and a "
            "tool parser only for native tool calls"
        )
