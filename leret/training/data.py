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
from leret.core.types import Messages, message, text_of

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
    return tuple(message(str(one["role"]), text_of(one)) for one in messages)


def finished_states(run: Run, predictors: Collection[str] | None = None) -> Iterator[StateSamples]:
    """The groups of finished questions under the policy that was sampled last; of some predictors, or of all.

    Raises:
        RunError: no question is finished.
        TrainingError: nothing was sampled at one of the predictors.
    """
    from leret.sampling.preferences.dataset import no_finished_question
    from leret.sampling.store.store import Store

    found, policy = set(), run.manifest.policy_digest
    with Store(run.store, read_only=True) as store:
        for group in store.finished(policy):
            found.add(group.state.predictor)
            if predictors is None or group.state.predictor in predictors:
                yield group
        if not found:
            raise no_finished_question(store, policy)
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
