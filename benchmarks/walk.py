"""How many of leret's files and functions one new sample passes through.

    python benchmarks/walk.py [--calls]

One question after another is sampled with one prompt and one completion, through an OpenAI-compatible server and BM25.
Of the last one, everything is traced from the moment its first state is taken up until the scored sample is handed to
the store. A call is a function of leret's that is entered, in any thread; comprehensions and the resumption of a
coroutine are not counted.
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

from kills import HERE, server, write_data

import leret
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.sampling.stage import sample

PACKAGE = str(Path(leret.__file__).parent)
FIRST, LAST = ("samples", "sample_state"), "put_samples"
N_QUESTIONS = 8


class Tracer:
    """Notes the functions of leret's between a call of one of ``FIRST`` and the call of ``LAST`` after it."""

    def __init__(self) -> None:
        self.walks: list[list[tuple[str, str]]] = []
        self._frames: list[FrameType] = []
        self._seen: set[int] = set()
        self._tracing = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in {"<listcomp>", "<genexpr>"}:
            return
        if id(frame) in self._seen:
            return
        self._seen.add(id(frame))
        self._frames.append(frame)  # while it is kept, no other frame gets its id
        name = code.co_name
        if name in FIRST and "rollouts" in code.co_filename + "/rollouts":
            self._tracing = True
            self.walks.append([])
        if self._tracing:
            self.walks[-1].append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))
            self._tracing = name != LAST

    def start(self) -> None:
        """Trace this thread and those that begin from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        """Trace no more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed does not know that None ends it


def walk_of_a_sample() -> list[tuple[str, str]]:
    """File and function of every call that one new sample takes."""
    with tempfile.TemporaryDirectory(prefix="leret-walk-") as name, server() as url:
        work = Path(name)
        write_data(work, N_QUESTIONS)
        recipe = SamplingRecipe.model_validate(
            {
                "data": {"kind": "jsonl", "split": "all", "corpus": str(work / "corpus.jsonl"),
                         "questions": str(work / "questions.jsonl")},
                "retriever": {"k": 3},
                "policy": {"kind": "openai", "model": "instant", "urls": [url], "max_tokens": 32},
                "program": {"path": f"{HERE.parent / 'pipelines/multihop.py'}:MultiHop", "hops": 2},
                "sampling": {"prompts": 1, "samples": 1, "concurrency": 1},
            }
        )  # fmt: skip
        tracer = Tracer()
        tracer.start()
        try:
            sample(recipe, Run.create(work / "run"))
        finally:
            tracer.stop()
    return tracer.walks[-2]  # the last question's first state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list the calls in their order")
    arguments = parser.parse_args()
    walk = walk_of_a_sample()
    files = Counter(file for file, _ in walk)
    print(f"one new sample: {len(files)} files, {len(walk)} calls")
    for file, n in files.most_common():
        print(f"{n:>4}  {file}")
    if arguments.calls:
        print(*(f"{file}: {function}" for file, function in walk), sep="\n")


if __name__ == "__main__":
    main()
