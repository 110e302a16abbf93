"""The reward `answer_likelihood`: a reader's probability of a reference answer.

The reader gets the passages found so far. It rewards searches by answers alone, without gold
documents, at every step of a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from leret.core.bundled import MINILM, POLICIES, SCOPES, policy_path
from leret.core.errors import ConfigError, import_optional
from leret.core.types import Outcome, Task
from leret.programs.prompts import reader_lines

NAME = "answer_likelihood"


class AnswerLikelihood:
    """The reward; its parameters are settings of the recipe."""

    def __call__(
        self, outcome: Outcome, model: str, passages: int = 6, words: int = 100
    ) -> float | None:
        """Return the geometric mean probability of the tokens of the likeliest reference answer.

        ``model`` is a causal LM: a directory (such as the policy's, with its weights from before
        training) or a name on the Hugging Face Hub. It runs on the CPU and reads the first
        ``words`` words of the best ``passages``. If they are too long for the model, the last ones
        are left out. None if the task has no reference answers.

        Source: the LM's likelihood as a teacher of a retriever, REPLUG (arXiv 2301.12652).
        """
        task = outcome.task
        if not task.answers:
            return None
        tokenizer, _ = _reader(model)
        chat = bool(tokenizer.chat_template)
        lines = reader_lines(task, outcome.ranking[:passages], words, chat)
        logprobs = mean_logprobs(model, lines, task.answers)
        return math.exp(max(logprobs))

    def applies(self, task: Task) -> bool:
        return bool(task.answers)


answer_likelihood = AnswerLikelihood()


@lru_cache(maxsize=4096)
def mean_logprobs(model: str, lines: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return the mean log-probability of each answer's tokens, after lines of `reader_lines`."""
    import torch

    tokenizer, network = _reader(model)
    limit = getattr(network.config, "max_position_embeddings", None) or math.inf
    means = []
    for answer in answers:
        text = answer if tokenizer.chat_template else f" {answer}"
        target = tokenizer.encode(text, add_special_tokens=False)
        prompt = _prompt_that_fits(tokenizer, lines, limit - len(target))
        with torch.inference_mode():
            output = network(torch.tensor([prompt + target]))
        logits = output.logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        chosen = logprobs[torch.arange(len(target)), target]
        means.append(float(chosen.mean()))
    return means


def _prompt_that_fits(tokenizer: Any, lines: Sequence[str], max_tokens: float) -> list[int]:
    """Leave out the last passages until the prompt fits; it always has the last two lines."""
    for n_passages in range(len(lines) - 2, -1, -1):
        text = "\n".join([*lines[:n_passages], *lines[-2:]])
        prompt = _prompt(tokenizer, text)
        if len(prompt) <= max_tokens:
            break
    return prompt


def _prompt(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=2)
def _reader(model: str) -> tuple[Any, Any]:
    library = import_optional("transformers", "transformers", "train")
    if model in SCOPES or model == MINILM:
        fault = f"model {model!r} cannot answer questions"
        raise ConfigError(f"{NAME}: {fault}; choose an LM that answers them")
    directory = policy_path(model) if model in POLICIES else model
    try:
        network = library.AutoModelForCausalLM.from_pretrained(
            directory, use_safetensors=True, dtype="float32"
        )
        tokenizer = library.AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        fault = f"model {model!r} cannot be loaded ({error})"
        raise ConfigError(f"{NAME}: {fault}; choose another model") from error
    return tokenizer, network.eval()
