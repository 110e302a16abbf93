"""Training of the LMs of a `LeReT.compile`, one algorithm and one LM after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import dspy
from dspy.teleprompt.bootstrap_finetune import copy_program_with_lms

from leret.config.messages import validated
from leret.core.errors import LeretError, PolicyError, TrainingError
from leret.core.types import Sample
from leret.optimize.finetune import train_examples
from leret.optimize.inputs import CountedPolicy, counted_policy
from leret.optimize.job import ALGORITHM_NAMES, ONLINE, CompileJob, in_thread
from leret.optimize.sampler import StudentSamples
from leret.optimize.student import StudentEnvironment
from leret.policies.base import Policy
from leret.programs.needs import NeedsCompletion
from leret.rollouts.actors import Role
from leret.sampling.store.store import StateSamples
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.data import GroupSamples, TrainingExample
from leret.training.model import training_record
from leret.training.stored.trainer import StoredAlgorithm

Examples = Mapping[dspy.LM, Sequence[TrainingExample]]


def stored_examples(job: CompileJob, samples: StudentSamples) -> Mapping[str, Examples]:
    """Return training examples by algorithm and LM, in the order of the states.

    Only algorithms that learn from stored samples have examples.

    Raises:
        PolicyError: no completion can be parsed.
        TrainingError: the completions have equal rewards at every state.
        LMCallsSpent: there are no examples because ``max_lm_calls`` ended the sampling.
    """
    by_algorithm: dict[str, Examples] = {}
    has_examples = False
    for name in job.stored:
        algorithm = cast(StoredAlgorithm, ALGORITHMS[name])
        by_lm: dict[dspy.LM, list[TrainingExample]] = {}
        for lm in dict.fromkeys(job.trained.values()):
            groups = [group for group in samples.groups if job.trained[group.state.predictor] is lm]
            recipe = recipe_for(job, name, lm, without="max_steps")
            by_lm[lm] = []
            with suppress(TrainingError):  # another LM or algorithm may have examples
                by_lm[lm] = algorithm.examples(recipe, GroupSamples(groups))
            has_examples = has_examples or bool(by_lm[lm])
        by_algorithm[name] = by_lm
    if not has_examples:
        raise samples.stopped or _nothing_learnt(samples.groups)
    return by_algorithm


def _nothing_learnt(groups: Sequence[StateSamples]) -> LeretError:
    samples: list[Sample] = []
    for group in groups:
        samples += group.samples
    unparsed = [
        sample.failure
        for sample in samples
        if sample.failure is not None and sample.failure.kind == "parse"
    ]
    if unparsed and len(unparsed) == len(samples):
        return PolicyError(
            f"all {len(samples)} completions failed to parse, for example: {unparsed[0].message}"
        )
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = sum(rewards) / max(1, len(rewards))
    advice = "raise samples or the LM's temperature, or use a finer reward"
    if not any(rewards):
        advice += (
            ". If gold documents are rewarded, check their ids, and that leret sees the searches"
        )
    return TrainingError(
        f"no training examples: the completions have equal rewards at each of {len(groups)} "
        f"sampled states ({len(samples)} completions, {len(unparsed)} unparsed, mean reward "
        f"{mean:.3f}); {advice}"
    )


def train(
    job: CompileJob, algorithm: str, examples: Examples, models: dict[dspy.LM, str]
) -> dspy.Module:
    """Train each LM further, update ``models``, and return the program with the trained LMs.

    ``models`` maps an LM to its model name. An online algorithm uses new samples instead of
    ``examples``.
    """
    for lm in dict.fromkeys(job.trained.values()):
        start = models.get(lm) or lm.finetuning_model or lm.model
        keys = _keys(job, algorithm, lm)
        if algorithm in ONLINE:
            before = job.budget.spent
            text = f"{lm.model} on new samples from {len(job.examples)} examples"
            job.log(algorithm, text, lm=lm.model)
            path = _train_online(job, start, keys, lm, models)
            models[lm] = _trained(job, algorithm, path, lm_calls=job.budget.spent - before)
            continue
        rows = examples.get(lm, ())
        text = f"{lm.model} on {len(rows)} examples"
        job.log(algorithm, text, lm=lm.model, examples=len(rows))
        if rows:
            path = train_examples(start, rows, keys, job.run.path, progress=job.progress)
            models[lm] = _trained(job, algorithm, path)
    return _program(job, models)


def _train_online(
    job: CompileJob, start: str, keys: Mapping[str, Any], lm: dspy.LM, models: Mapping[dspy.LM, str]
) -> Path:
    program = _program(job, models)
    for name, predictor in program.named_predictors():
        job.policies[name] = counted_policy(predictor.lm, job.budget)
    names = [name for name, trained in job.trained.items() if trained is lm]
    environment = StudentEnvironment(
        program,
        job.adapter,
        job.retriever,
        job.rm,
        lm,
        partial(_live_role, job, names),
        job.sampling,
        job.run.cache,
    )
    with dspy.context(callbacks=[], _leret_spend=job.budget.spend):
        return in_thread(
            train_examples,
            start,
            list(job.examples),
            {**keys, "predictors": names},
            job.run.path,
            progress=job.progress,
            environment=environment,
            run=job.run,
        )


def _live_role(job: CompileJob, names: Sequence[str], need: NeedsCompletion, live: Policy) -> Role:
    """Return the role for a call in online training.

    Only calls by ``names`` are sampled, with policy ``live``.
    """
    role = job.role(need)
    if not role.sampled or need.predictor not in names:
        return replace(role, sampled=False)
    policy = CountedPolicy(live.name, live.digest, job.budget, live.complete)
    return replace(role, policy=policy)


def recipe_for(job: CompileJob, algorithm: str, lm: dspy.LM, without: str = "") -> TrainingRecipe:
    """Return a training recipe without the keys that only `train_examples` takes."""
    keys = _keys(job, algorithm, lm)
    for name in ("enable_thinking", without):
        keys.pop(name, None)
    return validated(TrainingRecipe, keys, "train_kwargs")


def _keys(job: CompileJob, algorithm: str, lm: dspy.LM) -> dict[str, Any]:
    keys = dict(job.settings.train_kwargs[job.originals.get(lm, lm)] or {})
    algorithm_keys = {name: keys.pop(name, {}) for name in ALGORITHM_NAMES}[algorithm]
    defaults = {
        "seed": job.settings.seed,
        "enable_thinking": lm.engine.settings.enable_thinking,
    }
    return {**defaults, **keys, **algorithm_keys, "algorithm": algorithm}


def _trained(job: CompileJob, algorithm: str, path: Path, **values: Any) -> str:
    """Log the steps and the learning rate of a training.

    Return the model name of the trained LM.
    """
    record = training_record(path)
    rate = record.get("key", {}).get("recipe", {}).get("learning_rate")
    if rate is not None:
        text = f"{record['steps']} steps at learning rate {rate:g}"
        job.log(algorithm, text, learning_rate=rate, **values)
    return f"leret/{path}"


def _program(job: CompileJob, models: Mapping[dspy.LM, str]) -> dspy.Module:
    program = copy_program_with_lms(job.program)
    new = {lm: lm.copy(model=model, finetuning_model=None) for lm, model in models.items()}
    for predictor in program.predictors():
        predictor.lm = new.get(predictor.lm, predictor.lm)
    return program
