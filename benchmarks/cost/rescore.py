"""Measure the time of `leret rescore` for a run of 100,000 samples.

Command: python benchmarks/cost/rescore.py [--samples 100000] [--replay]

Writes a run with invented samples of a two-hop program (eight per state, six documents each), and rescores it with
rewards of increasing cost: a measure, parts with a group mixer, and a user's function that reads titles and texts. With
--replay, also a function that reads the program's output, which runs the program again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from leret.config.sampling import RewardSettings, SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Sample, Task
from leret.rewards import scoring
from leret.rollouts.environment import Environment
from leret.sampling.rescore import rescore
from leret.sampling.store.store import PathStep, SamplingParams, Store

OWN = """
def texts(outcome):
    words = set(outcome.task.text.split())
    return sum(len(words & set(f"{p.title} {p.text}".split())) for p in outcome.ranking) / 100
"""
ENDS = "def ended(outcome):\n    return float(outcome.prediction is not None)\n"
N_DOCUMENTS, A_STATE = 5000, 8
FEW = [f"d{i}" for i in range(200)]
"""Retrieved documents in addition to the gold documents."""


def write_data(directory: Path, n_questions: int, rng: random.Random) -> None:
    words = [f"w{i}" for i in range(3000)]
    with (directory / "corpus.jsonl").open("w") as file:
        for i in range(N_DOCUMENTS):
            row = {"doc_id": f"d{i}", "title": f"Title {i}", "text": " ".join(rng.choices(words, k=60))}
            file.write(json.dumps(row) + "\n")
    with (directory / "questions.jsonl").open("w") as file:
        for i in range(n_questions):
            gold = [f"d{j}" for j in rng.sample(range(N_DOCUMENTS), 2)]
            text = " ".join(rng.choices(words, k=12))
            file.write(json.dumps({"id": f"q{i}", "question": text, "relevant_doc_ids": gold}) + "\n")


def write_run(directory: Path, n_samples: int, rng: random.Random, per_state: int = A_STATE) -> Run:
    write_data(directory, n_samples // (2 * per_state), rng)
    files = {"questions": str(directory / "questions.jsonl"), "corpus": str(directory / "corpus.jsonl")}
    recipe = SamplingRecipe.model_validate(
        {
            "data": {"kind": "jsonl", "split": "all", **files},
            "program": {"path": "pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
            "policy": {"model": "demo"},
        }
    )
    run = Run.create(directory / "run")
    environment = Environment(recipe, run.cache)
    run.update(sampling=recipe.model_dump(mode="json"), digests={"policy": "P"})
    origin, ap = SamplingParams("made up", "P", "Z", 1.0, 1.0, 24), scoring("ap")
    with Store(run.store) as store:
        for task in environment.tasks():
            put(store, origin, task, ap, rng, per_state)
    return run


def put(
    store: Store, origin: SamplingParams, task: Task, ap: object, rng: random.Random, per_state: int = A_STATE
) -> None:
    from leret.core.types import Outcome, Passage, State

    parent = None
    for step in range(2):
        state = State(
            f"{task.id}-{step}",
            task.id,
            step,
            "write",
            {"question": task.text},
            ({"role": "user", "content": task.text},),
        )
        store.put_state(state)
        samples = []
        for n in range(per_state):
            found = rng.sample(FEW, 4) + ([rng.choice(task.gold)] if rng.random() < 0.5 else [])
            scores = tuple(sorted((round(rng.random() * 20, 6) for _ in found), reverse=True))
            outcome = Outcome(task, ranking=tuple(Passage(d, "", "", s) for d, s in zip(found, scores, strict=True)))
            value = ap(outcome)  # type: ignore[operator]
            query = " ".join(rng.sample(task.text.split(), 5))
            samples.append(
                Sample(
                    f"{state.id}-{n}",
                    state.id,
                    task.id,
                    step,
                    "0",
                    n,
                    n,
                    query,
                    {"query": query},
                    tuple(found),
                    scores,
                    value,
                    {"ap": value, "recall": value},
                )
            )
        store.put_samples(samples, origin)
        chosen = rng.choice(samples).id
        store.put_visit(PathStep(task.id, step, "P", state.id, parent, chosen, "next" if step == 0 else "finished"))
        parent = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--replay", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = write_run(directory, options.samples, random.Random(0))
        (directory / "own.py").write_text(OWN)
        (directory / "ends.py").write_text(ENDS)
        parts = {"recall@5": 1.0, "deepretrieval": 0.2, "format": 0.5, "steps": 0.1}
        specs = {
            "recall@5": "recall@5",
            "four parts, weights": RewardSettings.model_validate({"parts": parts}),
            "four parts, pca": RewardSettings.model_validate({"parts": parts, "mixer": "pca"}),
            "own, titles and texts": f"{directory / 'own.py'}:texts",
        } | ({"own, the program's end": f"{directory / 'ends.py'}:ended"} if options.replay else {})
        for what, spec in specs.items():
            began, cpu = time.perf_counter(), time.process_time()
            report = rescore(run, spec)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            told = f"{report.samples:,} samples, {report.changed:,} changed, {report.pairs:,} pairs"
            print(f"{what}: {wall:.1f} s ({cpu:.1f} s of CPU), {told}", flush=True)


if __name__ == "__main__":
    main()
