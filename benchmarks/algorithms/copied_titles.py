"""Hints whose titles the prompt does not contain: withheld, shown, or shown with a penalty for copies.

    python benchmarks/algorithms/copied_titles.py RUNS [--data DATA] [--world 0] [--seeds 0,1,2] [--split test]

leret withholds such titles (arm ``withheld``). ``shown`` shows them all. ``penalised`` has the same samples as
``shown``, but a completion that copies a title has a reward of -1: its words include all those of the title that are
in neither the question nor the passages. For each arm, the output has the copies among the samples and among sft's
targets, and the mean of the best reward of a state's other samples. Then sft is trained on each, and evaluated: recall
after the last hop, and the difference to ``withheld``. ``--count`` leaves this out.

First run ``distill.py hints RUNS``, which makes the runs of ``withheld`` and of sft without hints. With ``--data``,
SmolLM2-135M-Instruct is trained on HotpotQA in DATA, after ``distill.py smollm2 RUNS``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.algorithms import distill
from benchmarks.algorithms.online import Bench, measured
from leret.core.runs import Run
from leret.core.types import Sample, State
from leret.programs.mentions import words_of
from leret.rollouts.environment import Environment
from leret.sampling.preferences.dataset import state_targets
from leret.sampling.store.store import Store

WITHOUT_FILTER = """
import leret.rollouts.hints as hints
from leret.__main__ import main
hints._readable = lambda name, visible: name
main()
"""


def copies(run: Run) -> Iterator[Sample]:
    """Yield the samples that copy a gold title which their zero-shot prompt does not contain."""
    environment = Environment.open(run)
    tasks = {task.id: task for task in environment.tasks()}
    corpus = environment.corpus
    with Store(run.store, read_only=True) as store:
        for group in store.groups():
            visible = words_of(text_of(group.state))
            titles = [words_of(corpus[doc_id].title) for doc_id in tasks[group.state.task_id].gold]
            unseen = [words - visible for words in titles if not words <= visible]
            for sample in group.samples:
                written = words_of(sample.completion or "")
                if any(words <= written for words in unseen):
                    yield sample


def text_of(state: State) -> str:
    return "\n".join(str(message["content"]) for message in state.messages if message["role"] != "system")


def shown(path: Path, recipe: str, keys: tuple[str, ...]) -> Run:
    """Return a run sampled with all hints, if missing."""
    if not (path / "sample.done").is_file():
        words = [word for key in keys for word in ("--set", key)]
        command = [
            sys.executable,
            "-c",
            WITHOUT_FILTER,
            "sample",
            f"sampling/{recipe}.yaml",
            "--run",
            str(path),
            *words,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Run.open(path)


def penalised(run: Run, path: Path) -> Run:
    """Return a copy of a run in which copied titles have a reward of -1, made if missing."""
    if not path.is_dir():
        shutil.copytree(run.path, path, ignore=shutil.ignore_patterns("policies"))
        copy = Run.open(path)
        found = [replace(sample, reward=-1.0) for sample in copies(copy) if sample.reward is not None]
        with Store(copy.store) as store:
            store.put_rewards(found)
            store.flush()
    return Run.open(path)


def counts(run: Run) -> str:
    """Return how many samples and sft targets are copies, and the mean best reward of a state's other samples."""
    copied = {sample.id for sample in copies(run)}
    samples: list[Sample] = []
    targets: list[Sample] = []
    best: list[float] = []
    with Store(run.store, read_only=True) as store:
        for group in store.groups():
            samples += group.samples
            targets += state_targets(group)
            best.append(max((s.reward or 0.0 for s in group.samples if s.id not in copied), default=0.0))
    shares = (f"{sum(s.id in copied for s in some):,} of {len(some):,}" for some in (samples, targets))
    return " | ".join([*shares, f"{mean(best):.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", type=Path, help="directory with HotpotQA, for SmolLM2")
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", action="store_true", help="sample and count, but do not train")
    given = parser.parse_args()
    for seed in map(int, given.seeds.split(",")):
        compared(given.runs, given.data, given.world, seed, given.split, given.count)


def compared(runs: Path, data: Path | None, world: int, seed: int, split: str, only_count: bool) -> None:
    kind = "lm" if data else str(world)
    if data:
        recipe, sft, keys = "smollm2-rewrite", distill.LM_SFT, (*distill.hotpotqa_keys(data, seed), *distill.LM_HINTED)
        none, withheld = runs / f"plain-{seed}", runs / f"hinted-{seed}"
        bench, limit = Bench(recipes=("", "", "eval/hotpotqa.yaml")), ("limit=200",)
    else:
        recipe, sft, keys = "demo", distill.SFT["sft"], (*distill.world_keys(world, seed), *distill.HINTED)
        none, withheld = runs / f"world-{world}-{seed}", runs / f"hinted-{world}-{seed}"
        bench, limit = Bench(), ()
    arms = {"withheld": distill.sampled(withheld, recipe, *keys)}
    arms["shown"] = shown(runs / f"shown-{kind}-{seed}", recipe, keys)
    arms["penalised"] = penalised(arms["shown"], runs / f"penalised-{kind}-{seed}")
    for name, run in arms.items():
        print(f"| {seed} | {name} | {counts(run)} |", flush=True)
    if only_count:
        return
    plain = Run.open(none)
    for name, run in arms.items():
        distill.trained(run, {"sft": sft}, seed)
        distill.link(run, "sft", plain, name)
    for name, row in measured(bench, plain, ["sft", *arms], split, "withheld", *limit).items():
        print(f"| {seed} | {name} | {row['recall']:.3f} | {row.get('ahead', '')} |", flush=True)


if __name__ == "__main__":
    main()
