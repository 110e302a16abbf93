"""Training examples: read from samples, encoded, and checked against the sampled prompts.

A completion is trained as the sampled token ids where the store has them. Without them (texts from
an API that sends no ids, reference answers) its text is encoded again, which a tokenizer may split
differently than the sampler did. The end token follows a completion unless ``max_tokens`` cut it. A
stop string also ends a completion: the text before it is trained with an end token. A chat template
may end a rendered conversation differently (for example with a newline), but a sampler never
produces that ending.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Messages, Sample, State
from leret.policies.checkpoints import sampled_settings
from leret.policies.local.chat_template import PromptEncoder, apply_template, letters
from leret.training.model import InitialPolicy, training_record

if TYPE_CHECKING:
    from leret.sampling.store.store import StateSamples

_LOG = logging.getLogger("leret")
_STATES = 8  # number of states whose sampled prompts are checked
_COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "question_id",
    "predictor",
    "score_chosen",
    "score_rejected",
)
_SIDES = ("chosen", "rejected")
_ENDINGS = (
    "chosen_finish_reason",
    "rejected_finish_reason",
    "chosen_token_ids",
    "rejected_token_ids",
)


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A prompt with its completions: the target (SFT, KTO), or chosen and rejected.

    Attributes:
        scores: rewards of the completions (for KTO, minus the baseline); unused if the algorithm
            uses no rewards.
        is_cut: by completion, whether ``max_tokens`` cut it; empty if all ended.
        token_ids: by completion, the sampled token ids, or None; empty if there are none.
        learns_end: False excludes the end token from the loss (sft).
    """

    task_id: str
    prompt: Messages
    completions: tuple[str, ...]
    scores: tuple[float, ...] = ()
    is_cut: tuple[bool, ...] = ()
    token_ids: tuple[Sequence[int] | None, ...] = ()
    learns_end: bool = True

    @classmethod
    def of(
        cls, state: State, samples: Sequence[Sample], scores: tuple[float, ...] = ()
    ) -> TrainingExample:
        """Build an example from samples of a state."""
        return cls(
            state.task_id,
            plain(state.messages),
            tuple(str(sample.completion) for sample in samples),
            scores,
            tuple(sample.is_cut for sample in samples),
            tuple(sample.token_ids for sample in samples),
        )


@dataclass(frozen=True)
class GroupSamples:
    """Samples in memory.

    The completions of a pair have adjacent reward levels, as in the LeReT paper.
    """

    samples: Sequence[StateSamples]
    # reward of unparsable completions; None drops these completions
    unparsed_reward: float | None = None

    def groups(self) -> Iterable[StateSamples]:
        return self.samples

    def pairs(self) -> Iterator[TrainingExample]:
        from leret.sampling.preferences.dataset import distinct, make_pairs

        for group in self.samples:
            for pair in make_pairs(distinct(group.samples), "adjacent"):
                rewards = tuple(float(sample.reward or 0.0) for sample in pair)
                yield TrainingExample.of(group.state, pair, rewards)


@dataclass(frozen=True)
class RunSamples:
    """A run's samples and its pairs (from ``R/preferences``).

    The samples are of finished tasks, by the last sampling policy.
    """

    run: Run
    predictors: Collection[str] | None = None  # None: all

    @property
    def unparsed_reward(self) -> float | None:
        from leret.sampling.preferences.dataset import unparsed_reward

        return unparsed_reward(self.run)

    def groups(self) -> Iterator[StateSamples]:
        from leret.sampling.preferences.dataset import no_finished_question
        from leret.sampling.store.store import Store

        policy = self.run.manifest.policy_digest
        sampled = set()
        with Store(self.run.store, read_only=True) as store:
            for group in store.finished(policy):
                sampled.add(group.state.predictor)
                if self.predictors is None or group.state.predictor in self.predictors:
                    yield group
            if not sampled:
                raise no_finished_question(store, policy)
        _check_predictors(self.predictors, sampled)

    def pairs(self) -> list[TrainingExample]:
        """Return the pairs in ``R/preferences/train.parquet``, in file order."""
        rows = _pair_rows(self.run.preferences / "train.parquet")
        _check_predictors(self.predictors, {str(row["predictor"]) for row in rows})
        if self.predictors is not None:
            rows = [row for row in rows if row["predictor"] in self.predictors]
        return [_pair(row) for row in rows]


Samples = GroupSamples | RunSamples


def _pair_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise TrainingError(
            f"{path} is missing; write it with `leret sample`, or rebuild it with `leret rescore`"
        )
    try:
        # read_table imports pandas, which takes a second.
        table = pyarrow.parquet.ParquetFile(path).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}); rebuild it with `leret rescore`"
        ) from error
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise TrainingError(
            f"{path} has no column {', '.join(missing)} (it has {', '.join(table.column_names)}); "
            "rebuild it with `leret rescore`"
        )
    # Pairs of an older version lack the columns of endings.
    endings = [name for name in _ENDINGS if name in table.column_names]
    rows: list[dict[str, Any]] = table.select([*_COLUMNS, *endings]).to_pylist()
    if not rows:
        raise TrainingError(
            f"{path} holds no pairs, because no state has two completions with different rewards; "
            "sample more questions, more prompts or samples per state, or at a higher temperature"
        )
    return rows


def _pair(row: Mapping[str, Any]) -> TrainingExample:
    chosen, rejected = row["chosen"][0], row["rejected"][0]
    return TrainingExample(
        str(row["question_id"]),
        plain(row["prompt"]),
        (str(chosen["content"]), str(rejected["content"])),
        (float(row["score_chosen"]), float(row["score_rejected"])),
        tuple(row.get(f"{side}_finish_reason") == "length" for side in _SIDES),
        tuple(row.get(f"{side}_token_ids") for side in _SIDES),
    )


def plain(messages: Sequence[Any]) -> Messages:
    """Return messages with only role, text content, and the keys of native tool calls."""
    keys = ("role", "content", "tool_calls", "tool_call_id", "name", "tools")
    essential = []
    for message in messages:
        essential.append({key: message[key] for key in keys if message.get(key) is not None})
    return tuple(essential)


def _check_predictors(wanted: Collection[str] | None, sampled: Collection[str]) -> None:
    missing = sorted(set(wanted or ()) - set(sampled))
    if missing:
        available = ", ".join(sorted(sampled)) or "none"
        raise TrainingError(
            f"predictors: the run has no samples of {', '.join(missing)}; choose from: {available}"
        )


def completion_rows(
    examples: Sequence[TrainingExample], *, labelled: bool
) -> tuple[Iterator[dict[str, Any]], dict[str, str]]:
    """Return rows in TRL's conversational format, and the types of their columns.

    ``labelled`` adds KTO's ``label``.

    TRL encodes the texts again and ends each with an end token, so rows with ``is_cut`` should be
    left out.
    """
    columns = {
        "prompt": "messages",
        "completion": "messages",
        "question_id": "string",
        "is_cut": "bool",
    }
    if labelled:
        columns["label"] = "bool"
    return (_completion_row(example, labelled) for example in examples), columns


def _completion_row(example: TrainingExample, labelled: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": list(example.prompt),
        "completion": [{"role": "assistant", "content": example.completions[0]}],
        "question_id": example.task_id,
        "is_cut": any(example.is_cut),
    }
    if labelled:
        row["label"] = example.scores[0] >= 0
    return row


def examples_digest(examples: Sequence[TrainingExample]) -> str:
    """Return a digest of the examples in their order, with their scores, endings and token ids."""
    name = hashlib.blake2b(digest_size=16)
    for example in examples:
        content: list[Any] = [example.task_id, example.prompt, example.completions, example.scores]
        # other examples keep the digest of earlier versions
        if any(example.is_cut) or any(example.token_ids):
            content += [example.is_cut, example.token_ids]
        row = json.dumps(content, sort_keys=True)
        name.update(f"{row}\n".encode())
    return name.hexdigest()


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as token ids.

    A completion ends with the end token, unless ``max_tokens`` cut it.
    """

    prompt: list[int]
    completions: tuple[list[int], ...]
    scores: tuple[float, ...] = ()
    learns_end: bool = True

    @property
    def length(self) -> int:
        """Number of tokens in the prompt plus the longest completion."""
        return len(self.prompt) + max(len(ids) for ids in self.completions)

    @property
    def gain(self) -> float:
        """Difference of the rewards in a pair; 0 if the pair has no rewards."""
        if not self.scores:
            return 0.0
        chosen, rejected = self.scores
        return chosen - rejected


class TokenEncoder:
    """Encodes examples for one policy.

    Args:
        tokenizer: the policy's tokenizer.
        end: id that `leret.policies.local.chat_template.end_token` returns.
        enable_thinking: value for the chat template.
        stops: other end tokens of the sampler.
    """

    def __init__(
        self,
        tokenizer: Any,
        end: int,
        enable_thinking: bool | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.enable_thinking = enable_thinking
        self._sampler = PromptEncoder(tokenizer, None, str(tokenizer.name_or_path), enable_thinking)
        self._ends = self._sampler.set_ends([end, *stops])
        self._size = len(tokenizer.get_vocab())

    def encode(
        self, examples: Sequence[TrainingExample], *, same_tokenizer: bool = False
    ) -> list[Encoded]:
        """Encode examples.

        With ``same_tokenizer``, their token ids are from a sampler with this tokenizer.

        Raises:
            TrainingError: token ids are not those of the completion's text, with
                ``same_tokenizer``.
        """
        prompts: dict[str, list[int]] = {}  # pairs of a state share prompts and completions
        completions: dict[tuple[Any, ...], list[int]] = {}
        encoded = []
        for example in examples:
            prompt = str(example.prompt)
            if prompt not in prompts:
                prompts[prompt] = self.prompt_ids(example.prompt)
            ids = []
            for text, is_cut, token_ids in zip_longest(
                example.completions, example.is_cut, example.token_ids
            ):
                key = prompt, text, is_cut, token_ids and tuple(token_ids)
                if key not in completions:
                    sampled = self._sampled(
                        example.task_id, text, is_cut, token_ids, same_tokenizer
                    )
                    completions[key] = sampled or self._completion(
                        example.prompt, prompts[prompt], text, is_cut
                    )
                ids.append(completions[key])
            encoded.append(Encoded(prompts[prompt], tuple(ids), example.scores, example.learns_end))
        return encoded

    def render(self, messages: Messages) -> str:
        text = apply_template(
            self.tokenizer,
            messages,
            str(self.tokenizer.name_or_path),
            enable_thinking=self.enable_thinking,
            tokenize=False,
            add_generation_prompt=True,
        )
        return str(text)

    def prompt_ids(self, messages: Messages) -> list[int]:
        return list(self._sampler.encode(messages).token_ids)

    def _sampled(
        self,
        task_id: str,
        text: str,
        is_cut: bool | None,
        ids: Sequence[int] | None,
        same_tokenizer: bool,
    ) -> list[int] | None:
        """Return the sampled ids of a completion, with an end token unless it was cut.

        None means that its text must be encoded.

        The text is encoded if a stop string ended it: the sampled tokens then go on, without an end
        token.
        """
        if ids is None:
            return None
        fault = self._sampler.fault_of(ids, text, self._size)
        if fault is None:
            if is_cut or ids[-1] in self._ends:
                return list(ids)
            return [*ids, self.end]
        sampled_text = self._sampler.to_text(ids, special=True)
        goes_on = letters(sampled_text).startswith(letters(text))
        is_stopped = goes_on and not is_cut and ids[-1] not in self._ends
        if same_tokenizer and not is_stopped:
            raise TrainingError(
                f"question {task_id}: the sampler sent {fault}. Its tokenizer differs from that of "
                f"{self.tokenizer.name_or_path}, or it edits the text; serve the model with the "
                "policy's tokenizer and without a reasoning parser, and sample a new run"
            )
        return None

    def _completion(
        self, messages: Messages, prompt: list[int], text: str, is_cut: bool | None = None
    ) -> list[int]:
        """Encode a completion as it follows its prompt.

        It is encoded alone if a token would span both, as no sampled token does.
        """
        n_prompt = len(prompt)
        whole = self._ids(self.render(messages) + text)
        ids = whole[n_prompt:] if whole[:n_prompt] == prompt else self._ids(text)
        return ids if is_cut else [*ids, self.end]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_parity(
    run: Run | None,
    initial: InitialPolicy,
    encoder: TokenEncoder,
    predictors: Collection[str] | None = None,
) -> None:
    """Compare token counts of some zero-shot prompts with the sampler's, if there is a run.

    Raise `TrainingError` at the first difference.
    """
    if run is None or not run.store.is_file():
        return
    from leret.sampling.store.store import Store

    with Store(run.store, read_only=True) as store:
        groups = store.groups(run.manifest.policy_digest)
        trained = (
            group for group in groups if predictors is None or group.state.predictor in predictors
        )
        states = list(islice(trained, _STATES))
    _check_counts(run, initial, encoder, states, predictors)


def has_sampled_tokenizer(
    run: Run, initial: InitialPolicy, predictors: Collection[str] | None = None
) -> bool:
    """Return whether training starts from the sampled model, or from a policy that this run trained from it.

    A served model is the initial policy if their names agree, without the digest that `leret serve
    policy` appends.
    """
    name = initial.name
    while "/" not in name:
        record = training_record(run.policies / name)
        if not record:
            break
        name = str(record["parent"])
    if name == "base":
        return True
    model = str(sampled_settings(run, predictors).get("model", ""))
    served = model.rstrip("/").rpartition("/")[2]
    stem = re.sub("-[0-9a-f]{8}$", "", served)
    return not {served, stem}.isdisjoint({Path(name).name, initial.directory.name})


def _check_counts(
    run: Run,
    initial: InitialPolicy,
    encoder: TokenEncoder,
    states: Sequence[StateSamples],
    predictors: Collection[str] | None,
) -> None:
    """Compare token counts of zero-shot prompts with the sampler's.

    Only warn if the sampled model may be another.
    """
    for group in states:
        state = group.state
        ids = encoder.prompt_ids(plain(state.messages))
        counts = {sample.n_prompt_tokens for sample in group.samples if sample.prompt == "0"}
        counts -= {None, 0, len(ids)}
        if not counts:
            continue
        fault = (
            f"question {state.task_id}, step {state.step}: the sampler counted {counts.pop()} "
            f"tokens in the zero-shot prompt, but {initial.directory} encodes the same messages to "
            f"{len(ids)}; serve the model with the tokenizer and chat template of that directory, "
            "and sample again"
        )
        if has_sampled_tokenizer(run, initial, predictors):
            raise TrainingError(fault)
        _LOG.warning("%s, unless the sampler was another model", fault)
        return
