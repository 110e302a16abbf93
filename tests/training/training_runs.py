"""A sampled run without sampling: states, completions and rewards put into the store by hand."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from leret.core.runs import Run
from leret.core.types import Sample, State, digest
from leret.datasets.splits import split_of
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.schema import PathStep, SamplingParams
from leret.sampling.store.store import Store
from tests.tiny import WORDS

POLICY = "0" * 32
LETTERS = [word for word in WORDS if word.isalpha()]


class PowerCutError(Exception): ...


def fail() -> None:
    raise PowerCutError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Stopper:
    """A progress that does something at a step."""

    def __init__(self, step, what):
        self.step, self.what, self.seen = step, what, 0

    def start(self, stage, total): ...

    def finish(self): ...

    def advance(self, n=1, **facts):
        self.seen += n
        if self.seen == self.step:
            self.what()


def changed(recipe, **keys):
    """A recipe with other values."""
    return type(recipe)(**{**recipe.model_dump(), **keys})


def train_ids(n: int) -> list[str]:
    """The first ``n`` ids whose hash puts them into the train split."""
    ids = (f"q{i}" for i in range(10 * n + 10))
    return [id for id in ids if split_of(id) == "train"][:n]


def sampled_run(
    path: Path, base: Path, n_questions: int = 24, *, words: int = 8, spread: bool = True, system: str = ""
) -> Run:
    """Every question has one state with three completions of rewards 1, 0.5 and 0; all 0 without spread."""
    run = Run.create(path)
    run.update(
        sampling={"policy": {"kind": "local", "model": str(base)}, "data": {"kind": "jsonl", "seed": 0}},
        digests={"policy": POLICY},
    )
    rng = random.Random(0)
    origin = SamplingParams("base", POLICY, "p", 1.0, 1.0, 16)
    with Store(run.store) as store:
        for id in train_ids(n_questions):
            asked = {"role": "user", "content": f"question: {_text(rng, rng.randint(3, words))}"}
            messages = ({"role": "system", "content": system}, asked) if system else (asked,)
            state = State(digest(id, "s"), id, 0, "write", {"question": id}, messages)
            store.put_state(state)
            rewards = (1.0, 0.5, 0.0) if spread else (0.0, 0.0, 0.0)
            store.put_samples(
                [_sample(state, i, _text(rng, 2 + i), reward) for i, reward in enumerate(rewards)], origin
            )
            store.put_visit(PathStep(id, 0, POLICY, state.id, None, None, "solved"))
    build_preferences(run)
    run.held_out.write_text("[]")
    return run


def _text(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(LETTERS) for _ in range(n))


def _sample(state: State, index: int, completion: str, reward: float) -> Sample:
    return Sample(
        id=digest(state.id, index),
        state_id=state.id,
        question_id=state.question_id,
        step=0,
        prompt="0",
        index=index,
        seed=index,
        completion=completion,
        outputs={"query": completion},
        reward=reward,
    )
