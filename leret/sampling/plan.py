"""What a sampling run would do and cost, without doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config import SamplingRecipe
from leret.errors import LeretError
from leret.runs import Run
from leret.sampling.workbench import Workbench, located

if TYPE_CHECKING:
    from leret.pipelines.replay import Replay

__all__ = ["Plan", "n_bank_questions", "plan", "steps_of"]


@dataclass(frozen=True)
class Plan:
    """Upper bounds, and what is there already.

    Attributes:
        questions: to be sampled in all.
        steps: LM calls of one run of the program; None where they cannot be told without an LM.
        states: at most, over all questions.
        samples: at most, over all states.
        bank_calls: at most; 0 where the bank is there.
        lm_calls: completions at most, those of the bank included.
        stored_samples: in the store already, of any policy.
        bank_ready: the prompts are there.
        notes: what to look at.
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


def plan(recipe: SamplingRecipe, run: Run, *, base_dir: Path | None = None) -> Plan:
    """What `leret.sampling.stage.sample` would do; reads, and writes nothing.

    Args:
        recipe: of the run.
        run: need not exist.
        base_dir: where relative paths of the recipe start; None is the current directory.

    Raises:
        LeretError: the recipe's files cannot be read.
    """
    bench = Workbench(located(recipe, base_dir or Path.cwd()), run.cache)
    settings = recipe.sampling
    n_questions = len(bench.questions(recipe.data.split, recipe.data.limit))
    steps = steps_of(bench.replay, bench.formatter.signature)
    exists = run.manifest_path.is_file()
    bank_ready = settings.prompts == 1 or (exists and "bank" in run.manifest())
    rest = (_n_stored(run), bank_ready, bench.notes())
    if steps is None:
        return Plan(n_questions, None, None, None, 0 if bank_ready else None, None, *rest)
    n_train, n_dev = n_bank_questions(n_questions, settings.bank.train_questions, settings.bank.dev_questions)
    candidates = settings.bank.candidates
    bank_calls = 0 if bank_ready else steps * (n_train + candidates * n_dev)
    states = n_questions * steps
    samples = states * settings.prompts * settings.samples
    return Plan(n_questions, steps, states, samples, bank_calls, samples + bank_calls, *rest)


def n_bank_questions(n_questions: int, n_train: int, n_dev: int) -> tuple[int, int]:
    """Questions that the bank gets for its demos and for its scores, out of those that there are."""
    if n_questions >= n_train + n_dev:
        return n_train, n_dev
    share = n_questions * n_train // (n_train + n_dev)
    return max(share, min(1, n_questions)), n_questions - max(share, min(1, n_questions))


def steps_of(replay: Replay, signature: Callable[[str], Any]) -> int | None:
    """LM calls of one run, found by running the program on made-up outputs and empty rankings."""
    from leret.pipelines.replay import NeedsCompletion
    from leret.sampling.steps import MAX_STEPS

    outputs: list[dict[str, Any]] = []
    try:
        need = replay.run("?", outputs, lambda query, k: ())
        while isinstance(need, NeedsCompletion):
            if len(outputs) == MAX_STEPS:
                return None
            fields = signature(need.predictor).output_fields
            outputs.append({name: ["?"] if info.annotation == list[str] else "?" for name, info in fields.items()})
            need = replay.run("?", outputs, lambda query, k: ())
    except LeretError:
        return None  # it needs outputs that make sense
    return len(outputs)


def _n_stored(run: Run) -> int:
    from leret.sampling.store import Store

    if not run.store.is_file():
        return 0
    with Store(run.store, read_only=True) as store:
        return store.counts()["samples"]
