"""The reward `answer_likelihood`: a reader's probability of a reference answer, given the passages found so far.

It rewards searches by answers alone, without gold documents, at every step of a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from leret.core.bundled import MINILM, POLICIES, SCOPES, policy_path
from leret.core.errors import ConfigError, import_optional
from leret.core.types import Outcome, Passage, Task

NAME = "answer_likelihood"


def answer_likelihood(
    outcome: Outcome, model: str, passages: int = 6, words: int = 100
) -> float | None:
    """Return the geometric mean probability of the tokens of the likeliest reference answer.

    ``model`` is a causal LM: a directory (such as the policy's, with its weights from before training) or a name on the
    Hugging Face Hub. It runs on the CPU and reads the first ``words`` words of the best ``passages``. If they are too
    long for the model, the last ones are left out. None if the task has no reference answers.

    Source: the LM's likelihood as a teacher of a retriever, REPLUG (arXiv 2301.12652).
    """
    if not outcome.task.answers:
        return None
    chat = bool(_reader(model)[0].chat_template)
    lines = reader_lines(outcome.task, outcome.ranking[:passages], words, chat)
    return math.exp(max(mean_logprobs(model, lines, outcome.task.answers)))


def reader_lines(
    task: Task, passages: Iterable[Passage], words: int, chat: bool, instruction: str | None = None
) -> tuple[str, ...]:
    """Return the lines of a reader's prompt: the start of each passage, the task's inputs, and the instruction."""
    read = (f"{one.title}: {one.text}".removeprefix(": ") for one in passages)
    inputs = task.inputs if isinstance(task.inputs, dict) else {"question": task.text}
    texts = (" ".join(text.split()[:words]) for text in read)
    shown = "\n".join(f"{name}: {value}" for name, value in inputs.items())
    return (*texts, shown, instruction or ("Answer in a few words." if chat else "answer:"))


@lru_cache(maxsize=4096)
def mean_logprobs(model: str, lines: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return the mean log-probability of the tokens of each answer, after the lines of `reader_lines`."""
    import torch

    tokenizer, network = _reader(model)
    means = []
    for answer in answers:
        target = tokenizer.encode(
            answer if tokenizer.chat_template else f" {answer}", add_special_tokens=False
        )
        limit = getattr(network.config, "max_position_embeddings", None) or math.inf
        n = len(lines) - 2  # passages that fit
        while (
            len(prompt := _prompt(tokenizer, "\n".join([*lines[:n], *lines[-2:]]))) + len(target)
            > limit
            and n
        ):
            n -= 1
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.double().log_softmax(-1)[torch.arange(len(target)), target]
        means.append(float(chosen.mean()))
    return means


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
        raise ConfigError(
            f"{NAME}: model {model!r} cannot answer questions; choose an LM that answers them"
        )
    directory = policy_path(model) if model in POLICIES else model
    try:
        network = library.AutoModelForCausalLM.from_pretrained(
            directory, use_safetensors=True, dtype="float32"
        )
        return library.AutoTokenizer.from_pretrained(directory), network.eval()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{NAME}: model {model!r} cannot be loaded ({error}); choose another model"
        ) from error
