"""Rows of a run for other trainers: sampled tokens with advantages, and states for TRL's GRPO."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from leret.core.errors import ConfigError, RunError, TrainingError
from leret.core.runs import Run
from leret.core.types import Messages, State
from leret.policies.checkpoints import find_model, load_tokenizer, sampled_model, sampled_settings
from leret.policies.local.chat_template import PromptEncoder, dated
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.rollouts.credit import training_rewards
from leret.rollouts.environment import Environment
from leret.training.data import RunSamples, plain

RL_COLUMNS = {
    "group": "string",
    "sample": "string",
    "question_id": "string",
    "prompt_ids": "ints",
    "completion_ids": "ints",
    "logprobs": "floats",
    "reward": "float64",
    "parts": "string",
    "advantage": "float64",
    "temperature": "float64",
    "policy_digest": "string",
    "seed": "int64",
}
"""Columns of `rl_rows`; ``parts`` is a JSON object."""

GRPO_COLUMNS = {
    "prompt": "messages",
    "state": "string",
    "question_id": "string",
    "step": "int64",
    "predictor": "string",
    "inputs": "string",
    "relevant_doc_ids": "strings",
    "answers": "strings",
}
"""Columns of `grpo_rows`; ``inputs`` is a JSON object."""


class _Prompts:
    """Prompts of samples as token ids, checked against the sampler's token counts."""

    def __init__(self, run: Run, tokenizer: Path | None) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self.settings = cache(lambda predictor: sampled_settings(run, [predictor]))
        self._encoder = cache(self._load_encoder)
        self._bank = cache(lambda name: Prompt.load(run.prompts / f"{name}.json"))
        self._formatter = cache(lambda: Environment.open(run).formatter)

    def ids(self, state: State, name: str, counts: Collection[int | None]) -> list[int]:
        """Return the ids of a state under a prompt of the bank.

        Raise TrainingError if the sampler's ``counts`` differ.
        """
        with dated(self._run.manifest.date):
            encoder = self._encoder(state.predictor)
            ids = list(encoder.encode(self._messages(state, name)).token_ids)
        different = {*counts} - {None, 0, len(ids)}
        if different:
            raise TrainingError(
                f"question {state.task_id}, step {state.step}: the sampler counted "
                f"{different.pop()} tokens in prompt {name}, but the tokenizer gives {len(ids)}; "
                "use the tokenizer and the chat template of the sampled policy (--tokenizer DIR)"
            )
        return ids

    def shows_hint(self, name: str) -> bool:
        return name != ZERO_SHOT.name and self._bank(name).hint is not None

    def _messages(self, state: State, name: str) -> Messages:
        if name == ZERO_SHOT.name:
            return state.messages
        formatter = self._formatter()
        need = formatter.need(state.predictor, state.inputs)
        return formatter.messages(need, self._bank(name))

    def _load_encoder(self, predictor: str) -> PromptEncoder:
        settings = self.settings(predictor)
        if self._tokenizer is None and settings["kind"] != "local":
            raise ConfigError(
                f"{self._run.path} was sampled from {settings['model']!r} on a server; add "
                "--tokenizer DIR, the directory of that model's tokenizer"
            )
        directory = self._tokenizer or find_model(sampled_model(self._run, [predictor]))
        tokenizer = load_tokenizer(directory, settings.get("template"))
        return PromptEncoder(tokenizer, None, str(directory), settings.get("enable_thinking"))


def rl_rows(run: Run, tokenizer: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield the sampled texts of finished questions, by group: the samples of a state with one prompt of the bank.

    Advantages are those of ``grpo`` with its default keys. ``tokenizer`` replaces the sampled
    policy's tokenizer.

    Raises:
        RunError: no sample has token ids. TrainingError: the tokenizer disagrees with the sampler's
            token counts.
    """
    samples = RunSamples(run)
    prompts = _Prompts(run, tokenizer)
    n = 0
    unparsed_reward = samples.unparsed_reward
    for group in samples.groups():
        for name, members in groupby(group.samples, attrgetter("prompt")):
            if prompts.shows_hint(name):  # only the sampler had the hint
                continue
            scored = training_rewards(list(members), unparsed_reward)
            if all(sample.logprobs is None for sample in scored):
                continue
            advantages = _advantages([sample.reward or 0.0 for sample in scored])
            counts = [sample.n_prompt_tokens for sample in scored]
            prompt = prompts.ids(group.state, name, counts)
            for sample, advantage in zip(scored, advantages, strict=True):
                if sample.token_ids is None or sample.logprobs is None:
                    continue  # sampled without `sampling.token_ids`
                n += 1
                yield {
                    "group": f"{sample.state_id}-{sample.step}-{name}",
                    "sample": sample.id,
                    "question_id": sample.task_id,
                    "prompt_ids": prompt,
                    "completion_ids": list(sample.token_ids),
                    "logprobs": list(sample.logprobs),
                    "reward": sample.reward,
                    "parts": json.dumps(sample.components),
                    "advantage": advantage,
                    "temperature": prompts.settings(group.state.predictor)["temperature"],
                    "policy_digest": group.policy_digest,
                    "seed": sample.seed,
                }
    if not n:
        raise RunError(
            f"{run.store} has no token ids; sample into a new run with --set "
            "sampling.token_ids=true"
        )


def _advantages(rewards: Sequence[float]) -> list[float]:
    import torch

    from leret.training.rounds.advantages import group_relative

    values = torch.tensor(rewards, dtype=torch.float64)
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    advantages = group_relative(values, one_group, "group")
    return list(advantages.tolist())


def grpo_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each sampled state of the finished questions once, as TRL's GRPO reads it, with the question's labels."""
    with Environment.open(run) as environment:
        tasks = {task.id: task for task in environment.tasks(check=False)}
    seen = set()
    for group in RunSamples(run).groups():
        state = group.state
        if state.id in seen:
            continue
        seen.add(state.id)
        task = tasks.get(state.task_id)
        if task is None:
            raise RunError(
                f"question {state.task_id} was sampled but is not in the run's data; fix "
                "data.questions"
            )
        yield {
            "prompt": list(plain(state.messages)),
            "state": state.id,
            "question_id": state.task_id,
            "step": state.step,
            "predictor": state.predictor,
            "inputs": json.dumps(dict(state.inputs), ensure_ascii=False),
            "relevant_doc_ids": list(task.gold),
            "answers": list(task.answers),
        }
