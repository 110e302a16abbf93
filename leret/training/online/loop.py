"""Training on fresh samples: sample a round, estimate advantages, update, and again.

A checkpoint holds all that the next round depends on: weights, optimizer, schedule, random state, the weight of the KL
penalty, the log. Seeds follow from the recipe's and the round's number, so a training that was killed and goes on ends
in the same bits, on one thread.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from leret.core.files import write_atomically
from leret.core.progress import Progress, Silent
from leret.core.runs import Run, versions
from leret.core.types import Task, digest
from leret.policies.local.policy import LocalPolicy
from leret.sampling.rollouts.environment import Environment
from leret.training.alarms import best_step, first_alarms
from leret.training.callbacks import Monitor, monitored
from leret.training.checkpoints import CheckpointDirectory, TrainingRecord, TrainReport, checkpoint_step
from leret.training.data import Encoded
from leret.training.memory import check_memory, estimate_memory
from leret.training.model import InitialPolicy, pick_device, save_policy
from leret.training.online.advantages import group_deviations, on_one_side
from leret.training.online.losses import KL, KLController
from leret.training.online.recipe import OnlineAlgorithm, OnlineRecipe
from leret.training.online.rounds import RoundSampler, Sampled, round_of
from leret.training.online.update import Reference, RolloutBatch, Update, load_trainable
from leret.training.process import Interrupt, training_process
from leret.training.validation import Validation

_STATE, _LAST = "state.pt", "trainer_state.json"
_KEPT = 2
"""Checkpoints that are kept."""


class OnlineTraining:
    """A policy in training, round by round.

    Attributes:
        history: a log entry for each round so far, names as in TRL.
        validations: a log entry for each validation.
    """

    def __init__(
        self, recipe: OnlineRecipe, algorithm: OnlineAlgorithm, initial: InitialPolicy, bench: Environment, run: Run,
        tasks: Sequence[Task], device: str,
    ) -> None:  # fmt: skip
        torch.manual_seed(recipe.seed)
        self.recipe, self.tasks, self.n_rounds = recipe, tasks, recipe.n_rounds(len(tasks))
        self.history: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self._estimate = algorithm.estimate
        self.model, self.tokenizer = load_trainable(initial, recipe.lora, recipe.dtype, device)
        reference = Reference(self.model, initial, recipe.lora) if recipe.beta else None
        self._initial = initial.digest
        self.policy = LocalPolicy.over(
            self.model, self.tokenizer, name=recipe.policy_name, digest=initial.digest,
            enable_thinking=getattr(bench.recipe.policy, "enable_thinking", None),
        )  # fmt: skip
        self.sampler = RoundSampler(recipe, bench, run, self.policy)
        self.update = Update(
            self.model, self.tokenizer.pad_token_id, replace(recipe.objective, temperature=self.sampler.temperature),
            learning_rate=recipe.learning_rate, max_grad_norm=recipe.max_grad_norm,
            batch_size=recipe.per_device_train_batch_size, optimizer=_optimizer(recipe), reference=reference,
            bfloat16=recipe.dtype == "bfloat16",
        )  # fmt: skip
        self.kl = KLController(recipe.beta, recipe.target_kl, recipe.kl_horizon)
        self._schedule = _schedule(recipe, self.update.optimizer, recipe.n_steps(len(tasks)))

    @property
    def log(self) -> list[dict[str, Any]]:
        """Means over every ``logging_steps`` rounds, and the validations."""
        every = self.recipe.logging_steps
        means = [_mean(self.history[i : i + every]) for i in range(0, len(self.history), every)]
        return sorted([*means, *self.validations], key=lambda entry: entry["step"])

    def step(self) -> None:
        """One round; its log entry is the last of `history`."""
        number = len(self.history)
        self.policy.renew(digest(self._initial, self.recipe.model_dump(mode="json"), number))
        places = round_of(len(self.tasks), self.recipe.questions_per_round, self.recipe.seed, number)
        sampled = self.sampler.sample([self.tasks[place] for place in places], number)
        rate = self._schedule.get_last_lr()[0]
        entry = {"step": number + 1, "epoch": (number + 1) * len(places) / len(self.tasks), "learning_rate": rate}
        self.history.append({**entry, **sampled.facts, **(self._learn(sampled) if sampled.sequences else {})})

    def validate(self, validation: Validation) -> bool:
        """Run the program on held-out tasks; whether it was never better."""
        number, metric = len(self.history), self.recipe.metric_for_best_model
        self.validations.append({"step": number, **validation.run_model(self.model, self.tokenizer, number)})
        return best_step(self.validations, metric) == number

    def _learn(self, sampled: Sampled) -> dict[str, float]:
        recipe, update = self.recipe, self.update
        if not self.history:
            self._check_memory(sampled)
        batch = RolloutBatch.of(sampled.sequences, sampled.groups.to(update.device))
        steps = recipe.num_iterations * recipe.num_mini_batches
        if steps > 1 or recipe.kl_in_reward or recipe.objective.vf_coef:
            batch.old_logps, batch.values = update.evaluate(batch)
        if update.reference is not None:
            batch.reference = update.evaluate(batch, reference=True)[0]
        beta = self.kl.coefficient
        self._estimate(recipe, sampled, batch, beta)
        if recipe.keep_rollouts is not None:
            parts = sampled.parts if sampled.parts.shape[1] else sampled.rewards[:, None]
            kept = on_one_side(parts, sampled.groups, recipe.keep_rollouts).to(update.device)
            batch = batch.rows(kept.nonzero()[:, 0])
        batch.n_tokens = float(batch.mask.sum()) / recipe.num_mini_batches
        found: list[dict[str, float]] = []
        for order in range(recipe.num_iterations):
            for index in self._mini_batches(batch, order):
                if made := update.step(batch.rows(index), 0.0 if recipe.kl_in_reward else beta):
                    found.append(made)
                    self._schedule.step()
        return self._entry(sampled, batch, beta, found)

    def _check_memory(self, sampled: Sampled) -> None:
        """Warn, or refuse, before the first update, by the longest groups that are in memory at once."""
        groups: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = {}
        for number, sequence in zip(sampled.groups.tolist(), sampled.sequences, strict=True):
            groups.setdefault(number, []).append(sequence)
        examples = [Encoded(list(own[0][0]), tuple(list(ids) for _, ids in own)) for own in groups.values()]
        at_once = max(1, self.recipe.per_device_train_batch_size // self.recipe.num_generations)
        examples = sorted(examples, key=lambda example: -example.length)[:at_once]
        device = self.update.device.type
        check_memory(estimate_memory(self.model, self.recipe, examples, device), self.recipe, device)

    def _mini_batches(self, batch: RolloutBatch, order: int) -> list[torch.Tensor]:
        """Places of the completions of each optimizer step of a pass; those of one state stay together."""
        states = batch.groups.unique(sorted=True)
        if self.recipe.num_mini_batches == 1:
            return [torch.arange(len(batch.groups), device=batch.groups.device)]
        seed = int(digest(self.recipe.seed, len(self.history), order)[:15], 16)
        shuffled = states[torch.randperm(len(states), generator=torch.Generator().manual_seed(seed))]
        chunks = shuffled.tensor_split(self.recipe.num_mini_batches)
        return [torch.isin(batch.groups, own).nonzero()[:, 0] for own in chunks if len(own)]

    def _entry(
        self, sampled: Sampled, batch: RolloutBatch, beta: float, found: Sequence[Mapping[str, float]]
    ) -> dict[str, float]:
        rewards, groups = sampled.rewards, sampled.groups
        deviations = torch.stack([group_deviations(rewards, groups)[groups == g][0] for g in groups.unique()])
        entry = {
            "reward": float(rewards.mean()),
            "reward_std": float(deviations.mean()),
            "frac_reward_zero_std": float((deviations < 1e-8).float().mean()),
        }
        means = {name: sum(one[name] for one in found) / len(found) for name in (found[0] if found else ())}
        names = {"loss": "loss", "grad_norm": "grad_norm", "clipped": "clip_ratio/region_mean", "ratio": "val/ratio"}
        names |= {"kl": "kl", "policy_loss": "loss/policy_avg", "value_loss": "loss/value_avg"}
        entry |= {names[name]: value for name, value in means.items()}
        kl, length = 0.0, float(batch.mask.sum(1).mean())
        if batch.reference is not None:
            entry["kl_coef"] = beta
            if batch.old_logps is not None:
                kl = float((KL[self.recipe.kl_estimator](batch.old_logps, batch.reference) * batch.mask).sum(1).mean())
                entry["kl"] = kl / length
            kl = entry.get("kl", 0.0) * length
            self.kl.update(kl, len(rewards))
        if self.recipe.kl_in_reward:
            entry |= {"objective/kl": kl, "objective/scores": entry["reward"]}
            entry["objective/rlhf_reward"] = entry["reward"] - beta * kl
            entry["policy/entropy"] = sampled.facts["entropy"]
        return entry

    def save(self, directory: Path) -> None:
        """Write a checkpoint after the last round; the file that makes it whole comes last."""
        path = directory / f"checkpoint-{len(self.history)}"
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "weights": {name: weight.detach() for name, weight in self.update.trained().items()},
            "optimizer": self.update.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, path / _STATE)
        last = {"global_step": len(self.history), "kl_coef": self.kl.coefficient}
        write_atomically(path / _LAST, json.dumps({**last, "history": self.history, "validations": self.validations}))
        best = best_step(self.validations, self.recipe.metric_for_best_model)
        for old in sorted(directory.glob("checkpoint-*"), key=checkpoint_step)[:-_KEPT]:
            if checkpoint_step(old) != best:
                shutil.rmtree(old)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path / _STATE, map_location=self.update.device, weights_only=True)
        with torch.no_grad():
            for name, weight in self.update.trained().items():
                weight.copy_(state["weights"][name])
        self.update.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"].cpu())
        last = json.loads((path / _LAST).read_text(encoding="utf-8"))
        self.history, self.validations, self.kl.coefficient = last["history"], last["validations"], last["kl_coef"]

    def load_best(self, directory: Path) -> None:
        """Take the weights of the best validation, where there were any."""
        best, log = best_step(self.validations, self.recipe.metric_for_best_model), (self.history, self.validations)
        if best not in (None, len(self.history)):
            self.load(directory / f"checkpoint-{best}")
            self.history, self.validations = log

    def close(self) -> None:
        """End the threads of sampling."""
        self.sampler.close()
        self.policy.close()


def fit_online(
    recipe: OnlineRecipe,
    algorithm: OnlineAlgorithm,
    initial: InitialPolicy,
    run: Run,
    tasks: Sequence[Task],
    directory: CheckpointDirectory,
    key: Mapping[str, Any],
    progress: Progress | None = None,
    interrupt: Interrupt | None = None,
    validation: Validation | None = None,
    event: Callable[..., None] | None = None,
) -> TrainReport:
    """Train and publish one policy, or go on with it from its last checkpoint.

    Raises:
        LeretError: the loss is no number, an alarm stopped the training, or too many samples failed.
        KeyboardInterrupt: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    began, progress, interrupt = time.monotonic(), progress or Silent(), interrupt or Interrupt()
    device = pick_device(recipe.device)
    with training_process(recipe.threads if device == "cpu" else None), Environment.open(run) as bench:
        training = OnlineTraining(recipe, algorithm, initial, bench, run, tasks, device)
        directory.drop_broken()
        checkpoint = directory.checkpoint()
        if checkpoint is not None:
            training.load(checkpoint)
        try:
            with monitored(recipe, directory.path, event) as monitor, interrupt.handled():
                _rounds(training, directory.path, progress, interrupt, monitor, validation)
        finally:
            progress.finish()
            training.close()
        training.load_best(directory.path)
        record = _record(training, initial, key, time.monotonic() - began, validation)
        save_policy(training.model, training.tokenizer, directory.final)
        peft = hasattr(training.model, "peft_config")
        record.write(directory.final, algorithm.describe(recipe), initial.base_model, peft)
        directory.publish()
    seconds = time.monotonic() - began
    return record.report(directory.policy, seconds, resumed_from=checkpoint_step(checkpoint))


def _rounds(
    training: OnlineTraining,
    directory: Path,
    progress: Progress,
    interrupt: Interrupt,
    monitor: Monitor,
    validation: Validation | None,
) -> None:
    recipe = training.recipe
    progress.start(f"train {recipe.policy_name}", training.n_rounds)
    progress.advance(len(training.history))
    monitor.begin(training.log)
    if validation is not None and not training.validations:
        training.validate(validation)
    for done in range(len(training.history) + 1, training.n_rounds + 1):
        training.step()
        last, better = done == training.n_rounds, False
        if validation is not None and recipe.eval_steps and (last or done % recipe.eval_steps == 0):
            better = training.validate(validation)
        stopped = (last or done % recipe.logging_steps == 0) and monitor.see(training.log)
        shown = {name: training.history[-1][name] for name in ("reward", "loss") if name in training.history[-1]}
        progress.advance(1, **shown)
        if stopped or better or interrupt.requested or done % recipe.save_steps == 0:
            training.save(directory)
        if stopped or interrupt.requested:
            break
    monitor.check()


def _record(
    training: OnlineTraining,
    initial: InitialPolicy,
    key: Mapping[str, Any],
    seconds: float,
    validation: Validation | None,
) -> TrainingRecord:
    recipe, history, log = training.recipe, training.history, training.log
    steps = len(history) * recipe.num_iterations * recipe.num_mini_batches
    return TrainingRecord(
        name=recipe.policy_name,
        algorithm=recipe.algorithm,
        key=key,
        parent=recipe.init_from,
        examples=int(sum(entry["num_samples"] for entry in history)),
        dropped=0,
        steps=steps,
        total_steps=initial.total_steps + steps,
        seconds=round(seconds, 3),
        preflight=0.0,
        versions=versions(),
        log_history=log,
        best_step=best_step(log, recipe.metric_for_best_model),
        alarms=[asdict(alarm) for alarm in first_alarms(log, recipe.metric_for_best_model)],
        validation=[] if validation is None else sorted(validation.ids),
    )


def _mean(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the entries that have it; step and epoch are those of the last."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    means = {name: [entry[name] for entry in entries if name in entry] for name in names}
    last = {name: entries[-1][name] for name in ("step", "epoch")}
    return {name: sum(values) / len(values) for name, values in means.items()} | last


def _optimizer(recipe: OnlineRecipe) -> tuple[Any, Mapping[str, Any]]:
    """The class and the arguments that transformers takes for the recipe's ``optim``."""
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(
        output_dir="unused", optim=recipe.optim, learning_rate=recipe.learning_rate, report_to=[], use_cpu=True,
    )  # fmt: skip
    kind, more = Trainer.get_optimizer_cls_and_kwargs(given)
    return kind, {**more, "weight_decay": recipe.weight_decay} if recipe.optim != "adafactor" else more


def _schedule(recipe: OnlineRecipe, optimizer: torch.optim.Optimizer, n: int) -> Any:
    from transformers import get_scheduler

    warmup = recipe.warmup_steps or math.ceil(recipe.warmup_ratio * n)
    return get_scheduler(recipe.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=n)
