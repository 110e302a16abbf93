"""Measure the speed and quality of pickers on one thread.

    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py long [--sentences 40000] [--model DIRECTORY]
    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py features
    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py update [--sentences 50] [--model DIRECTORY]
    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py babilong --data DATA --out OUT [--task qa2] [--seeds 3]
    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py variants --data DATA --out OUT
    OMP_NUM_THREADS=1 python benchmarks/quality/picking.py expand --data DATA --out OUT

The first three commands use sentences of random words. ``long`` embeds the sentences of one long text and picks among
these. ``features`` scores 1,000 states of 20 candidates with 25 features each. ``update`` runs forward and backward
passes of both heads for 48 episodes of two picks. Without ``--model``, encoders start untrained, with relative
positions as in the recipe `babilong`.
``babilong`` runs the shipped recipes of that name, one training per seed, and `leret eval` at several lengths. qa3 has
only 1,000 stories, so each is used 16 times with different names; the test file is bAbI's. ``variants`` repeats this
with pqn and changed values and positions, one seed each. ``expand`` trains `expand-pick` on HotpotQA,
adds the rule that is best on the dev split, and evaluates the first picker on other data sets.
``--set`` overrides keys of the trainings. DATA is the folder of data sets.

    embed_s     CPU-seconds until the first pick, with all sentences encoded
    step_ms     CPU-milliseconds of a later pick (maximum)
    *_ms        CPU-milliseconds (minimum of several runs)
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from leret.config.policy import EncoderSettings, FeaturesSettings
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Candidate, Choice, Task
from leret.datasets.records import Problems
from leret.evaluation.statistics import bootstrap_intervals
from leret.extras.babilong import babi_records
from leret.policies.base import Completion, Request
from leret.policies.pickers.picker import Picker, open_picker
from leret.rollouts.environment import Environment
from leret.training.validation import Validation

ROOT = Path(__file__).parents[2]
SETS = {
    "hover": ("hotpotqa", "hover/queries_dev.jsonl.gz"),
    "musique": ("musique", "musique/queries_all.jsonl.gz"),
    "2wiki": ("2wikimultihopqa", "2wikimultihopqa/queries_all.jsonl.gz"),
}
"""Corpus and questions by data set."""

WORDS = 2000
PICKS = 6


def milliseconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def sentence(rng: random.Random) -> str:
    return " ".join(f"word{int(WORDS * rng.random() ** 2)}" for _ in range(rng.randint(5, 15)))


def story(n: int, seed: int) -> Choice:
    rng = random.Random(seed)
    return Choice("pick", {"question": sentence(rng)}, [Candidate(str(i), sentence(rng), "", i) for i in range(n)])


def after(choice: Choice, place: int) -> Choice:
    left = [*choice.candidates[:place], *choice.candidates[place + 1 :]]
    return Choice(choice.predictor, choice.context, left, (*choice.picked, choice.candidates[place]))


def encoder(arguments: argparse.Namespace, choices: list[Choice]) -> Picker:
    picker = open_picker(EncoderSettings(model=arguments.model, positions="relative"))
    picker.fit(choices)
    return picker


def long(arguments: argparse.Namespace) -> dict[str, object]:
    choice = story(arguments.sentences, 0)
    picker = encoder(arguments, [choice])
    times, clock = [], []
    for _ in range(1 + PICKS):
        asked, chosen, began = Request((), (0,), 0.0, 1, choice=choice), [], time.monotonic()
        times.append(milliseconds(lambda asked=asked, chosen=chosen: chosen.extend(picker.complete_many([asked])[0])))
        clock.append(round(1000 * (time.monotonic() - began), 1))
        choice = after(choice, [one.id for one in choice.candidates].index(chosen[0].text))
    dimensions = picker.model["state"].get_embedding_dimension()
    steps = [round(ms, 1) for ms in times[1:]]
    embedding = {"dimensions": dimensions, "embed_s": round(times[0] / 1000, 2)}
    return {**embedding, "step_cpu_ms": steps, "step_ms": clock[1:], "max_step_ms": max(clock[1:])}


def features(arguments: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(0)
    data = [{f"n{i}": rng.random() for i in range(24)} for _ in range(100)]
    choices = [
        Choice("pick", {}, [Candidate(str(i), "", "", None, rng.choice(data)) for i in range(20)]) for _ in range(1000)
    ]
    picker = open_picker(FeaturesSettings())
    picker.fit(choices)
    function = picker._function._function
    both = [milliseconds(lambda: picker.score(choices)) for _ in range(9)]
    alone = [milliseconds(lambda: [function(choice) for choice in choices]) for _ in range(9)]
    requests = [Request((), tuple(range(8)), 1.0, 1, choice=choice) for choice in choices]
    draws = [milliseconds(lambda: picker.complete_many(requests)) for _ in range(5)]
    return {
        "function_ms": round(min(alone), 1),
        "score_ms_beside_it": round(min(both) - min(alone), 1),
        "complete_ms_8_seeds": round(min(draws), 1),
    }


def update(arguments: argparse.Namespace) -> dict[str, object]:
    episodes = [story(arguments.sentences, seed) for seed in range(48)]
    choices = [*episodes, *[after(choice, 3) for choice in episodes]]
    picker = encoder(arguments, choices)

    def backward() -> None:
        torch.cat([values.flatten() for values in picker.q(choices, twin=True)]).square().mean().backward()

    def score() -> None:
        picker.renew("new weights")
        picker.score(choices)

    scores, updates = ([milliseconds(work) for _ in range(7)] for work in (score, backward))
    n = sum(weights.numel() for weights in picker.model.parameters())
    return {"parameters": n, "score_ms": round(min(scores), 1), "update_ms": round(min(updates), 1)}


def leret(*words: object) -> float:
    """Run a leret command, and return its CPU-seconds, including imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "leret", *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def table(summary: Path, measure: str) -> dict[str, list[float]]:
    """Return a measure with its interval after the last hop, by system."""
    rows = json.loads(summary.read_text())["rows"]
    return {row["system"]: [row["hops"][-1][measure], *row["hops"][-1][f"{measure}_ci"]] for row in rows}


PQN = {"learning_rate": 1.5e-3, "tau": 0.05, "warmup_ratio": 0.02, "num_mini_batches": 4, "max_steps": 1600,
       "limit": 100000, "eval_steps": 100, "eval_tasks": 200, "metric_for_best_model": "all_found"}  # fmt: skip
"""Keys of training/pqn.yaml for an untrained encoder, chosen on the dev split."""
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "grpo": ("babilong", {}),
    "pqn": ("pqn", PQN),
    "pqn-hard-values": ("pqn", {**PQN, "soft_value": False}),
    "pqn-no-target": ("pqn", {**PQN, "tau": 1}),
}
"""Recipe, and keys to override."""
TASKS = {"qa3": ("program.budget=3", "data.facts=80", "data.sentences=[80,100]")}
"""Sampling keys per task. Stories are as long in evaluation."""
NAMES = (
    ("Mary", "John", "Daniel", "Sandra"), ("milk", "apple", "football"),
    ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
)  # fmt: skip
"""Interchangeable words in bAbI's stories: people, things, places."""
COPIES = {"train": 16, "dev": 2}


def renamed(record: dict[str, object], rng: random.Random, copy: int) -> dict[str, object]:
    """Return the same story with different people, things and places."""
    other = {name: new for names in NAMES for name, new in zip(names, rng.sample(names, len(names)), strict=True)}
    told = json.dumps({key: record[key] for key in ("story", "question", "answer")})
    return {
        **record,
        "id": f"{record['id']}-{copy}",
        **json.loads(re.sub(r"\w+", lambda m: other.get(m[0], m[0]), told)),
    }


def augmented(arguments: argparse.Namespace) -> Path:
    """Write a small task's data: training questions repeated with different names, and bAbI's test file."""
    [raw] = (arguments.data / "babi" / "raw").glob(f"{arguments.task}_*")
    path, rng = arguments.out / f"{arguments.task}.jsonl", random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file, gzip.open(arguments.data / "babi" / f"queries_{arguments.task}_test.jsonl.gz") as test:
        for record in babi_records(raw, Problems()):
            own = dict(record.value, split="dev" if record.value["split"] == "dev" else "train")
            copies = [renamed(own, rng, i) for i in range(1, COPIES[own["split"]])]
            file.writelines(json.dumps(one) + "\n" for one in [own, *copies])
        file.writelines(json.dumps(dict(json.loads(line), split="test")) + "\n" for line in test)
    return path


def stories(arguments: argparse.Namespace, run: Path, *more: str) -> float:
    """Sample a bAbI task, and return the CPU-seconds."""
    small = arguments.task in TASKS
    [questions] = [augmented(arguments)] if small else (arguments.data / "babi" / "raw").glob(f"{arguments.task}_*")
    files = f"data.questions={questions}", f"data.noise=[{arguments.data / 'noise_text' / '2600-0.txt.gz'}]"
    return leret("sample", "sampling/babilong.yaml", "--run", run, *settings(*files, *more))


def fact_em(arguments: argparse.Namespace, run: Path, *more: str) -> dict[str, dict[str, list[float]]]:
    """Return fact EM by length and system."""
    small = arguments.task in TASKS
    for n in (100 if small else 30, 160, 1200):
        keys = [f"data.sentences={n}", *["data.facts=80"] * small]
        leret("eval", "eval/babilong.yaml", "--run", run, *settings(*keys, *more))
    return {path.parent.name: table(path, "fact_em") for path in sorted(run.glob("eval/*/summary.json"))}


def babilong(arguments: argparse.Namespace) -> dict[str, object]:
    run = arguments.out / arguments.task
    seconds = {"sample": stories(arguments, run, *TASKS.get(arguments.task, ()))}
    for seed in range(arguments.seeds):
        own = settings(f"seed={seed}", f"name=seed-{seed}", *arguments.set)
        seconds[f"seed-{seed}"] = leret("train", "training/babilong.yaml", "--run", run, *own)
    return {"task": arguments.task, "fact_em": fact_em(arguments, run), "cpu_s": seconds}


def variants(arguments: argparse.Namespace) -> dict[str, object]:
    found, seconds = {}, {}
    for positions in ("relative", "absolute"):
        run = arguments.out / positions
        stories(arguments, run, f"policy.positions={positions}")
        for name in VARIANTS if positions == "relative" else ("grpo",):
            recipe, keys = VARIANTS[name]
            own = settings(f"name={name}", *(f"{key}={json.dumps(value)}" for key, value in keys.items()))
            seconds[f"{positions} {name}"] = leret("train", f"training/{recipe}.yaml", "--run", run, *own)
        found[positions] = fact_em(arguments, run, "limit=400")
    return {"fact_em": found, "cpu_s": seconds}


class Rule:
    """Actor that picks by a rule."""

    name = digest = "rule"

    def __init__(self, worth: Callable[[Candidate, int], float]) -> None:
        self.worth = worth

    async def complete(self, request: Request) -> list[Completion]:
        assert request.choice is not None
        candidates, step = request.choice.candidates, len(request.choice.picked)
        return [Completion(max(candidates, key=lambda one: self.worth(one, step)).id, "stop", 0, 0)]

    async def aclose(self) -> None: ...


def near(one: Candidate) -> float:
    return one.data.get("sentence_overlap", -1.0)


def after_word(one: Candidate) -> float:
    return one.data.get("after_question_word", -1.0) + one.data.get("page_overlap", 0.0)


def own(one: Candidate) -> float:
    return one.data.get("own", 0.0)


RULES: dict[str, Callable[[Candidate, int], float]] = {
    "own names, then the question": lambda one, step: 2 * own(one) + one.data.get("question", 0.0),
    "name in the sentence nearest to the question": lambda one, step: near(one),
    "name after a word of the question": lambda one, step: after_word(one),
    "own names, then nearest": lambda one, step: 9 * own(one) + near(one),
    "nearest, then own names": lambda one, step: near(one) + 9 * own(one) * (step > 0),
    "nearest, own names, the question": lambda one, step: (
        near(one) if not step else 9 * own(one) + one.data.get("question", 0.0)
    ),
}


def recalls(environment: Environment, policy: object, tasks: Sequence[Task]) -> list[float]:
    """Return the recall of gold documents at the end of each task."""
    found = asyncio.run(Validation(environment, tasks, "recall")._rollouts(policy))  # type: ignore[arg-type]
    ids = [{passage.doc_id for passage in rollout.ranking} for rollout in found]
    return [len(own & {*task.gold}) / len({*task.gold}) for own, task in zip(ids, tasks, strict=True)]


def difference(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the mean difference of paired values, and its 95 % interval."""
    values = np.subtract(a, b)
    return [round(float(x), 4) for x in (values.mean(), *bootstrap_intervals(values[:, None])[0])]


def opened(run: Path, data: Path, name: str) -> tuple[Environment, list[Task]]:
    """Open the run's program on all questions of another data set. The index is saved next to the run's index."""
    sampling = SamplingRecipe.model_validate(Run.open(run).sampling())
    corpus, questions = SETS[name]
    files = {"kind": "jsonl", "questions": str(data / questions), "corpus": str(data / corpus / "corpus.jsonl.gz")}
    of_set = {"split": "all", "limit": 400, **files}
    recipe = sampling.model_copy(update={"data": sampling.data.model_copy(update=of_set)})
    environment = Environment(recipe, run.parent / f"cache-{name}")
    return environment, environment.tasks("all", 400, check=False)


def expand(arguments: argparse.Namespace) -> dict[str, object]:
    run, recipe = arguments.out / "expand", "expand-pick.yaml"
    of_data = arguments.data / "hotpotqa"
    given = settings(f"data.questions={of_data}/queries_all.jsonl.gz", f"data.corpus={of_data}/corpus.jsonl.gz")
    seconds = {"sample": leret("sample", f"sampling/{recipe}", "--run", run, *given)}
    names = [f"grpo-{seed}" for seed in range(arguments.seeds)]
    for seed, name in enumerate(names):
        own = settings(f"seed={seed}", f"name={name}", *arguments.set)
        seconds[name] = leret("train", f"training/{recipe}", "--run", run, *own)
    seconds["eval"] = leret("eval", f"eval/{recipe}", "--run", run)
    with Environment.open(Run.open(run)) as environment:
        dev, test = (environment.tasks(split) for split in ("dev", "test"))
        worth = {name: float(np.mean(recalls(environment, Rule(rule), dev))) for name, rule in RULES.items()}
        best = max(worth, key=worth.__getitem__)
        raw = recalls(environment, Rule(lambda one, step: one.data.get("question", 0.0)), test)
        rule = recalls(environment, Rule(RULES[best]), test)
        rows = {name: recalls(environment, pickers(run, name), test) for name in names}
        rows["grpo"] = np.mean([rows[name] for name in names], axis=0).tolist()
    others = {}
    for name in SETS:
        environment, tasks = opened(run, arguments.data, name)
        with environment:
            found = recalls(environment, pickers(run, names[0]), tasks)
            alone = recalls(environment, Rule(lambda one, step: one.data.get("question", 0.0)), tasks)
        others[name] = [len(tasks), float(np.mean(alone)), float(np.mean(found)), difference(found, alone)]
    return {
        "n": len(test), "raw": float(np.mean(raw)), "rules_on_dev": worth, "best_rule": [best, float(np.mean(rule))],
        "recall": {name: float(np.mean(row)) for name, row in rows.items()},
        "minus_raw": {name: difference(row, raw) for name, row in rows.items()},
        "minus_rule": {name: difference(row, rule) for name, row in rows.items()},
        "others": others, "cpu_s": seconds,
    }  # fmt: skip


def pickers(run: Path, name: str) -> Picker:
    return open_picker(FeaturesSettings(model=str(run / "policies" / name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["long", "features", "update", "babilong", "variants", "expand"])
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--model", default="scratch")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", default="qa2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.sentences = arguments.sentences or {"long": 40_000}.get(arguments.what, 50)
    print(json.dumps({"what": arguments.what, **globals()[arguments.what](arguments)}, indent=1))


if __name__ == "__main__":
    main()
