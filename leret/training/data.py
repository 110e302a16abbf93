"""What is trained on: examples read from the run, and as token ids.

The ids are made here as the sampler produces them: prompt, generation prompt, completion, one end token. A trainer
that tokenises conversations itself renders the whole of them by the chat template. Where that template writes a newline
after the end token, or leaves out or adds anything else in the last turn, it would train what is never sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.base import Messages
from leret.policies.local.chat_template import apply_template, n_common

if TYPE_CHECKING:
    from leret.sampling.store.schema import StateSamples

_TURNS = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A prompt with its completions: the target alone (SFT, KTO), or the chosen and the rejected one, in this order.

    ``scores`` are the completions' rewards where the algorithm looks at them; of KTO, what the reward is above the
    state's baseline.
    """

    task_id: str
    prompt: Messages
    completions: tuple[str, ...]
    scores: tuple[float, ...] = ()


def plain(messages: Sequence[Any]) -> Messages:
    """Messages with role and content as texts."""
    return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages)


def finished_states(run: Run, predictors: Collection[str] | None = None) -> Iterator[StateSamples]:
    """The groups of finished questions under the policy that was sampled last; of some predictors, or of all.

    Raises:
        TrainingError: nothing was sampled at one of the predictors.
    """
    from leret.sampling.store.store import Store

    found = set()
    with Store(run.store, read_only=True) as store:
        for group in store.finished(run.manifest.policy_digest):
            found.add(group.state.predictor)
            if predictors is None or group.state.predictor in predictors:
                yield group
    check_predictors(predictors, found)


def check_predictors(wanted: Collection[str] | None, found: Collection[str]) -> None:
    """TrainingError where a wanted one was not found."""
    missing = sorted(set(wanted or ()) - set(found))
    if missing:
        raise TrainingError(
            f"predictors: nothing to train on of {', '.join(missing)}; the run has {', '.join(sorted(found)) or 'none'}"
        )


def completion_rows(
    examples: Sequence[TrainingExample], *, labelled: bool
) -> tuple[Iterator[dict[str, Any]], dict[str, str]]:
    """Rows for other programs, conversational as TRL reads them, with their columns' types as in `export_rows`.

    ``label`` is true for a desirable completion, as KTO has it.
    """
    columns = {"prompt": "messages", "completion": "messages", "question_id": "string"}
    rows = (
        {
            "prompt": list(example.prompt),
            "completion": [{"role": "assistant", "content": example.completions[0]}],
            "question_id": example.task_id,
        }
        | ({"label": example.scores[0] >= 0} if labelled else {})
        for example in examples
    )
    return rows, columns | ({"label": "bool"} if labelled else {})


def examples_digest(examples: Sequence[TrainingExample]) -> str:
    """Names what is trained on: the prompts, completions and scores in order."""
    name = hashlib.blake2b(digest_size=16)
    for example in examples:
        row = json.dumps([example.task_id, example.prompt, example.completions, example.scores], sort_keys=True)
        name.update(row.encode())
        name.update(b"\n")
    return name.hexdigest()


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as ids; every completion ends in the end token."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    scores: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longest completion."""
        return len(self.prompt) + max(len(ids) for ids in self.completions)


class TokenEncoder:
    """Encodes examples for one policy; ``end`` as `end_token` gives it."""

    def __init__(self, tokenizer: Any, end: int, enable_thinking: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.enable_thinking = enable_thinking

    def encode(self, examples: Sequence[TrainingExample]) -> list[Encoded]:
        prompts = [self.render(example.prompt) for example in examples]
        texts = dict.fromkeys(prompts) | {
            prompt + text: None
            for prompt, example in zip(prompts, examples, strict=True)
            for text in example.completions
        }
        ids = dict(zip(texts, self._ids(list(texts)), strict=True))
        return [
            Encoded(
                list(ids[prompt]),
                tuple(self._completion(ids[prompt], ids[prompt + text], text) for text in example.completions),
                example.scores,
            )
            for prompt, example in zip(prompts, examples, strict=True)
        ]

    def render(self, messages: Messages) -> str:
        """The prompt as text, up to and including the generation prompt."""
        how = {"enable_thinking": self.enable_thinking, "tokenize": False, "add_generation_prompt": True}
        return str(apply_template(self.tokenizer, messages, str(self.tokenizer.name_or_path), **how))

    def prompt_ids(self, messages: Messages) -> list[int]:
        return self._ids([self.render(messages)])[0]

    def _completion(self, prompt: list[int], whole: list[int], text: str) -> list[int]:
        """Encoded alone where a token would span the boundary to the prompt, which a sampler cannot produce."""
        if whole[: len(prompt)] == prompt:
            return [*whole[len(prompt) :], self.end]
        return [*self._ids([text])[0], self.end]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoding = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return [list(ids) for ids in encoding["input_ids"]]


def end_token(tokenizer: Any, stops: Sequence[int]) -> int:
    """Id of the token that ends a completion: the one of ``stops`` that the chat template writes after a turn.

    ``stops`` are the ids at which generation stops; a template whose turns the sampler's text cannot give is refused.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; add chat_template.jinja to its directory"
        )
    known = list(stops) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    if not known:
        raise TrainingError(
            f"{tokenizer.name_or_path} names no end token; set eos_token_id in its generation_config.json"
        )
    prompt = tokenizer.apply_chat_template(list(_TURNS[:1]), tokenize=True, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(list(_TURNS), tokenize=True)["input_ids"]
    turn = whole[n_common(prompt, whole) :]
    length = next((place for place, token in enumerate(turn) if token in known), None)
    answer = [token for token in turn[:length] if token != tokenizer.unk_token_id]
    written = tokenizer.decode(answer)
    # A hybrid model's empty thought is text; a mark that the sampler's text leaves out is not.
    if length is None or written != tokenizer.decode(answer, skip_special_tokens=True):
        raise TrainingError(
            f"the chat template of {tokenizer.name_or_path} writes a turn as {written!r}; it must end in a token at "
            f"which generation stops ({', '.join(tokenizer.convert_ids_to_tokens(known))}), with no other special "
            "token before it; mend its chat_template.jinja, or eos_token_id in its generation_config.json"
        )
    return int(turn[length])
