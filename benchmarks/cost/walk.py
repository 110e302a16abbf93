"""Count the files and functions of leret that one new sample, or one training, passes through.

    python benchmarks/cost/walk.py [--train] [--calls]

Samples questions one after another with one prompt and one completion, an OpenAI-compatible server and BM25. The last
question is traced from its first state until its scored sample reaches the store. A call is the entry of a leret
function in any thread; comprehensions and resumed coroutines do not count. tests/rollouts/test_walk.py limits the
counts.

With --train, traces IPO on a few questions of a generated world, from the call of `leret.training.stage.train` to its
return.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import leret
from benchmarks.correctness.kills import ROOT, server, write_data
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.retrieval import batching
from leret.sampling.stage import sample
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe

PACKAGE = str(Path(leret.__file__).parent)
FIRST, LAST = "_of_prompt", "put_samples"
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
N_QUESTIONS = 8


class Tracer:
    """Records the leret functions entered from a call of ``FIRST`` to the next call of ``LAST``.

    It is also a stage's progress, to start at the last question only: tracing is slow, and leret calls slow retrievers
    in a different way.
    """

    def __init__(self) -> None:
        self.walk: list[tuple[str, str]] = []
        self._frames: dict[int, FrameType] = {}  # holding a frame keeps its id unique
        self._n_done = 0
        self._tracing = False

    def start(self, stage: str, total: int | None) -> None:
        self._n_done = 0

    def advance(self, n: int = 1, **facts: Any) -> None:
        self._n_done += n
        if self._n_done == N_QUESTIONS - 1:
            threading.setprofile(self._see)
            sys.setprofile(self._see)

    def finish(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed lacks None, which stops tracing

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        if id(frame) in self._frames:  # a resumed coroutine
            return
        self._frames[id(frame)] = frame
        self._tracing = self._tracing or (code.co_name == FIRST and not self.walk)
        if self._tracing:
            self.walk.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))
            self._tracing = code.co_name != LAST


def walk_of_a_sample() -> list[tuple[str, str]]:
    """Return file and function of each call for one new sample."""
    batching._QUICK_S = 1.0  # on a busy machine, a fast search may look slow and be moved to a thread
    with tempfile.TemporaryDirectory(prefix="leret-walk-") as name, server() as url:
        work = Path(name)
        write_data(work, N_QUESTIONS)
        recipe = SamplingRecipe.model_validate(
            {
                "data": {"kind": "jsonl", "split": "all", "corpus": str(work / "corpus.jsonl"),
                         "questions": str(work / "questions.jsonl")},
                "retriever": {"k": 3},
                "policy": {"kind": "openai", "model": "instant", "urls": [url], "max_tokens": 32},
                "program": {"path": f"{ROOT / 'pipelines/multihop.py'}:MultiHop", "hops": 2},
                "sampling": {"prompts": 1, "samples": 1, "concurrency": 1},
            }
        )  # fmt: skip
        tracer = Tracer()
        sample(recipe, Run.create(work / "run"), progress=tracer)
    return tracer.walk


def walk_of_a_training() -> list[tuple[str, str]]:
    """Return file and function of each call of a training, in its thread."""
    walk = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            walk.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))

    with tempfile.TemporaryDirectory(prefix="leret-walk-") as name:
        recipe = SamplingRecipe.model_validate(
            {
                "data": {"kind": "world", "options": {"n_train": 20, "n_dev": 5, "n_test": 5}, "limit": 6},
                "policy": {"kind": "local", "model": "demo", "max_tokens": 12},
                "program": {
                    "path": f"{ROOT / 'pipelines/multihop.py'}:MultiHop",
                    "adapter": {"kind": "compact"},
                },
                "sampling": {"prompts": 1, "samples": 6},
            }
        )
        run = Run.create(Path(name) / "run")
        sample(recipe, run)
        training = IPORecipe()
        sys.setprofile(see)
        train(training, run)
        sys.setprofile(None)
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="trace a training instead of a sample")
    parser.add_argument("--calls", action="store_true", help="list the calls in order")
    arguments = parser.parse_args()
    walk = walk_of_a_training() if arguments.train else walk_of_a_sample()
    files = Counter(file for file, _ in walk)
    print(f"one {'training' if arguments.train else 'new sample'}: {len(files)} files, {len(walk)} calls")
    for file, n in files.most_common():
        print(f"{n:>4}  {file}")
    if arguments.calls:
        print(*(f"{file}: {function}" for file, function in walk), sep="\n")


if __name__ == "__main__":
    main()
