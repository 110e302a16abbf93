"""Estimating the work and cost of a sampling run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from leret.config.base import resolve_paths
from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Passage, Ranking, Task
from leret.policies.checkpoints import load_tokenizer, policy_directory, read_model_json
from leret.policies.local.chat_template import PromptEncoder
from leret.programs.checks import made_up_path
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import Prompt
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.environment import Environment
from leret.rollouts.states import LOOKED_AT
from leret.sampling.bank.bank import n_bank_questions, n_candidates
from leret.sampling.store.store import Store

_LARGE_SHARE = 0.4


@dataclass(frozen=True)
class SampleEstimate:
    """Estimated maximum work of a sampling run.

    Attributes:
        steps: LM calls per program run; None if unknown without an LM.
        lm_calls: completions, including completions for the prompt bank.
        bank_share: share of the prompt bank in ``lm_calls``.
        stored_samples: samples in the store, from all policies.
        prompt_tokens: length of the longest few-shot prompt tried; None if the policy is not in a
            local directory.
    """

    questions: int
    steps: int | None
    states: int | None
    samples: int | None
    bank_calls: int | None
    lm_calls: int | None
    stored_samples: int
    bank_ready: bool
    notes: Sequence[str] = ()
    prompt_tokens: int | None = None
    positions: int | None = None
    bank_share: float = 0.0


def estimate(recipe: SamplingRecipe, run: Run) -> SampleEstimate:
    """Estimate the work of `sample` with these arguments. Write nothing; the run need not exist."""
    environment = Environment(resolve_paths(recipe, Path.cwd()), run.cache)
    settings = recipe.sampling
    for spec in settings.rewards:
        scoring(spec, "sampling.reward")
    questions = environment.tasks(recipe.data.split, recipe.data.limit, recipe.data.part)
    n_questions = len(questions)
    steps = steps_of(environment)
    bank_ready = settings.n_few_shot == 0 or (
        run.manifest_path.is_file() and run.manifest.bank is not None
    )
    n_stored = 0
    if run.store.is_file():
        with Store(run.store, read_only=True) as store:
            n_stored = store.counts()["samples"]
    if steps is None:
        n_bank = 0 if bank_ready else None
        return SampleEstimate(
            n_questions, None, None, None, n_bank, None, n_stored, bank_ready, environment.notes()
        )
    n_train, n_dev = n_bank_questions(
        n_questions, settings.bank.train_questions, settings.bank.dev_questions
    )
    candidates = n_candidates(settings, n_questions)
    bank_calls = 0 if bank_ready else steps * (n_train + candidates * n_dev)
    states = n_questions * steps
    samples = states * settings.prompts * settings.samples
    to_end = settings.credit != "step" and (
        settings.credit != "auto" or bool(environment.replay.stops)
    )
    n_on = settings.n_continuations * to_end
    more = (
        samples * n_on * (steps - 1) // 2
    )  # a sample continues for half of the other steps on average
    if settings.credit == "auto" and len(environment.replay.names) > 1:
        more += min(LOOKED_AT, n_questions) * steps
    lengths = _lengths(environment, questions[:20])
    n_calls = samples + more + bank_calls
    share = bank_calls / max(1, n_calls)
    notes = [*environment.notes(), *_bank_notes(share, candidates)]
    counts = (n_questions, steps, states, samples, bank_calls, n_calls, n_stored, bank_ready)
    return SampleEstimate(*counts, notes, *lengths, round(share, 2))


def _bank_notes(share: float, n_candidates: int) -> list[str]:
    if share <= _LARGE_SHARE:
        return []
    return [
        f"the prompt bank takes {share:.0%} of the LM calls; lower sampling.bank.candidates (now {n_candidates}), or "
        "set sampling.prompts: 1"
    ]


def steps_of(environment: Environment) -> int | None:
    """Count LM calls in a program run with made-up outputs and empty rankings.

    None if the program fails on them.
    """
    needs, why = _made_up_path(environment, Task.question("?", "?"), iter(()))
    return None if why else len(needs)


def _made_up_path(
    environment: Environment, task: Task, passages: Iterator[Passage]
) -> tuple[list[NeedsCompletion], str | None]:
    class Passages:
        digest = "made up"

        def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
            return [tuple(islice(passages, k)) for _ in queries]

    async def run() -> tuple[list[NeedsCompletion], str | None]:
        searches = SearchBatcher(Passages())
        try:
            return await made_up_path(environment.runner(searches), task)
        finally:
            searches.close()

    return asyncio.run(run())


def _lengths(environment: Environment, questions: Sequence[Task]) -> tuple[int | None, int | None]:
    """Return the length of the longest prompt with the corpus's passages, and the context length."""
    policy, formatter, settings = (
        environment.recipe.policy,
        environment.formatter,
        environment.recipe.sampling,
    )
    path = policy_directory(policy.model) or Path(policy.model)
    config = read_model_json(path / "config.json") if path.is_dir() else {}
    positions = config.get(
        "max_position_embeddings", config.get("n_positions")
    )  # the name in GPT-2
    if not isinstance(policy, LocalPolicySettings) or positions is None:
        return None, None
    tokenizer = load_tokenizer(path, policy.template)
    zero_shot, few_shot = (
        PromptEncoder(tokenizer, n, policy.model, policy.enable_thinking) for n in (positions, None)
    )
    n_demos = settings.bank.max_demos if settings.n_few_shot else 0
    passages = cycle(
        Passage(d.doc_id, d.title, d.text, 0.0) for d in islice(environment.corpus.values(), 1000)
    )
    demos: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    longest = 0
    for question in questions:
        for need in _made_up_path(environment, question, passages)[0]:
            name = need.predictor
            examples = demos[name]
            if name in environment.replay.picks or name in environment.recipe.policies:
                continue
            zero_shot.encode(formatter.messages(need))
            messages = formatter.messages(need, Prompt("1", {name: examples[:n_demos]}))
            longest = max(longest, len(few_shot.encode(messages).token_ids))
            examples.append(
                {**need.inputs, **dict.fromkeys(need.call.signature.output_fields, question.text)}
            )
    return longest or None, positions
