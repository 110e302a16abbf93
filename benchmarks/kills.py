"""Kills `leret sample` again and again, and compares what is left with a run that nobody touched.

    python benchmarks/kills.py [--kills 20] [--faults 0.3] [--questions 400] [--samples 1]
    OMP_NUM_THREADS=1 python benchmarks/kills.py --recipe sampling/demo.yaml [--kills 20] [--questions 60]
    OMP_NUM_THREADS=1 python benchmarks/kills.py --train grpo --run RUN [--kills 10]   # ppo, pqn ...; RUN: sampled

Every session is a process of its own that ends by SIGKILL, at a moment drawn between its first request and the run's
last one; the next session goes on. At the end the samples, the visits and the bytes of the preferences must be those
of the undisturbed run.

"Asked twice" is counted like this: the server names every request by its content, and each completion carries that
name. After each kill the store is read: a completion in it is finished. If the server hears the same request again
after that, a finished sample was asked for twice. Repeats of requests that were in flight, or answered and not yet
committed, are allowed and counted; repeats of requests that got a faulty answer are what retries are.

With --recipe, the recipe's own policy is sampled, in the process that is killed; a kill falls where the store holds a
share of the samples that is drawn, and up to a second later, the making of the bank included.

With --train, `leret train` is killed after a drawn checkpoint and up to three seconds later. Weights and log must be
those of a training that nobody touched, to the last bit.

Exit code 0 where everything holds, 1 where something does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.sampling.stage import sample

HERE = Path(__file__).resolve().parent
PICKERS = ("pick", "pqn")
WORDS = [f"{a}{b}" for a in ("al", "be", "co", "du", "er", "fi", "go", "hu") for b in ("ba", "ne", "ri", "so", "tu")]


@dataclass
class Outcome:
    """What the sessions did to a run.

    Attributes:
        asked_twice: requests of finished samples that the server heard again; must be 0.
        repeated: requests that the server heard more than once, of all ``requests``, with fault-free answers.
        at: share of the requests that were answered at each kill.
    """

    requests: int = 0
    asked_twice: int = 0
    repeated: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    sessions: int = 0
    at: list[float] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """The instant server in a process of its own; gives its base URL."""
    command = [sys.executable, str(HERE / "instant_server.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def told(url: str, what: str) -> Any:
    with urlopen(url.removesuffix("/v1") + what, timeout=60) as answer:
        return json.load(answer)


def write_data(directory: Path, n_questions: int) -> None:
    """Documents of invented words, and questions that two of them answer."""
    rng = random.Random(0)
    titles = [f"{a} {b}" for a in WORDS for b in WORDS[:10]]
    documents = [
        {"doc_id": f"d{i}", "title": title, "text": f"{title} is near {' '.join(rng.choices(WORDS, k=20))}"}
        for i, title in enumerate(titles)
    ]
    questions = []
    for i in range(n_questions):
        one, two = rng.sample(range(len(titles)), 2)
        text = f"what joins {titles[one]} and {titles[two]} in case {i}"
        questions.append({"id": f"q{i}", "question": text, "answer": "", "relevant_doc_ids": [f"d{one}", f"d{two}"]})
    for name, rows in (("corpus", documents), ("questions", questions)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_prompts(directory / "prompts")


def write_prompts(directory: Path, n: int = 3) -> None:
    """Few-shot prompts, so that no bank is bootstrapped."""
    directory.mkdir(exist_ok=True)
    passage = "A Title | a passage of a few dozen words that says what the document is about " * 3
    for i in range(1, n + 1):
        demos = [{"question": f"who made film {j}?", "context": [passage] * 3, "query": f"film {j}"} for j in range(i)]
        prompt = {"name": str(i), "score": None, "demos": {"write_query": demos}, "instructions": {}}
        (directory / f"{i}.json").write_text(json.dumps(prompt))


def recipe_of(directory: Path, url: str, n_samples: int, timeout_s: float) -> SamplingRecipe:
    return SamplingRecipe.model_validate(
        {
            "data": {
                "kind": "jsonl", "split": "all",
                "corpus": str(directory / "corpus.jsonl"), "questions": str(directory / "questions.jsonl"),
            },
            "retriever": {"k": 3, "stopwords": None},
            "policy": {"kind": "openai", "model": "instant", "urls": [url], "max_tokens": 32, "timeout_s": timeout_s},
            "program": {"path": f"{HERE.parent / 'pipelines/multihop.py'}:MultiHop", "hops": 2},
            "sampling": {
                "prompts": 4, "samples": n_samples, "bank": {"path": str(directory / "prompts")}, "max_error_rate": 0.5,
            },
        }
    )  # fmt: skip


def preload() -> None:
    """Import all that a session imports, so that its forks need not."""
    import pyarrow.parquet  # noqa: F401


def session(recipe: SamplingRecipe, path: Path) -> int:
    """Start `leret sample`'s stage in a fork: what it imports is imported already. Returns its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        report = sample(recipe, Run.create(path))
        os._exit(3 if report.waiting else 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def finish(recipe: SamplingRecipe, path: Path) -> int:
    """Sessions until nothing waits; returns how many it took."""
    for n in range(1, 20):
        status = os.waitstatus_to_exitcode(os.waitpid(session(recipe, path), 0)[1])
        if status == 0:
            return n
        if status != 3:
            raise SystemExit(f"a session ended with {status}")
    raise SystemExit("questions wait after 20 sessions")


def finished(path: Path) -> set[str]:
    """Names of the requests whose completions are committed."""
    return {name_in(text) for text in completions(path)}


def completions(path: Path) -> list[str]:
    """All that are committed."""
    store = path / "rollouts.db"
    if not store.is_file():
        return []
    with sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True) as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'samples'").fetchone()[0]
        rows = database.execute("SELECT completion FROM samples WHERE completion IS NOT NULL") if tables else ()
        texts = [text for (text,) in rows]
    database.close()
    return texts


def name_in(completion: str) -> str:
    return next(word[1:] for word in reversed(completion.split()) if len(word) == 17 and word[0] == "r")


def content(path: Path) -> tuple[Any, ...]:
    """All that a run holds: rows of every table in a fixed order, and the bytes of the preferences."""
    with sqlite3.connect(f"{(path / 'rollouts.db').as_uri()}?mode=ro", uri=True) as database:
        tables = [
            sorted(database.execute(f"SELECT * FROM {name}"), key=repr) for name in ("states", "samples", "visits")
        ]
    database.close()
    return (*tables, (path / "preferences" / "train.parquet").read_bytes())


def disturb(recipe: SamplingRecipe, path: Path, url: str, n_requests: int, n_kills: int, seed: int) -> Outcome:
    """Sample with so many kills, and to the end."""
    rng = random.Random(seed)
    outcome, began = Outcome(), time.monotonic()
    committed: dict[str, int] = {}  # how often a finished request had been asked when it was first seen finished
    for moment in sorted(rng.uniform(0, n_requests) for _ in range(n_kills)):
        pid = session(recipe, path)
        while told(url, "/count")["answered"] < moment and not os.waitpid(pid, os.WNOHANG)[0]:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        outcome.at.append(round(told(url, "/count")["answered"] / n_requests, 3))
        asked = told(url, "/asked")["asked"]
        for name in finished(path) - committed.keys():
            committed[name] = asked[name]
    outcome.sessions = n_kills + finish(recipe, path)
    last = told(url, "/asked")
    outcome.requests = len(last["asked"])
    outcome.asked_twice = sum(last["asked"][name] > n for name, n in committed.items())
    outcome.repeated = sum(n > 1 for n in last["answered"].values())
    outcome.faults = last["failed"]
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def compare_local(file: Path, n_questions: int, n_kills: int, seed: int) -> tuple[Outcome, bool]:
    """As `compare`, of a recipe's policy in the process that is killed."""
    recipe = load_recipe(file, SamplingRecipe, [f"data.limit={n_questions}"])
    directory = Path(tempfile.mkdtemp(prefix="leret-kills-"))
    rng = random.Random(seed)
    outcome, began = Outcome(), time.monotonic()
    try:
        finish(recipe, directory / "whole")
        n_samples = len(completions(directory / "whole"))
        for moment in sorted(rng.uniform(0, n_samples) for _ in range(n_kills)):
            pid = session(recipe, directory / "killed")
            while len(completions(directory / "killed")) < moment and not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 1))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            outcome.at.append(round(len(completions(directory / "killed")) / n_samples, 3))
        outcome.sessions = n_kills + finish(recipe, directory / "killed")
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome, content(directory / "whole") == content(directory / "killed")
    finally:
        shutil.rmtree(directory)


def compare_training(algorithm: str, run: Path, n_kills: int, seed: int) -> bool:
    """Whether an online training that was killed ends as one that was not."""
    size = {"max_steps": 176 if algorithm == "ppo" else 44, "save_steps": 2, "learning_rate": 1e-3, "logging_steps": 1}
    if algorithm not in PICKERS:
        size |= {"num_generations": 4, "temperature": 1.0, "max_completion_length": 16}
    rng, policies = random.Random(seed), run / "policies"

    def begin(name: str) -> subprocess.Popen[bytes]:
        given = [word for key, value in {**size, "name": name}.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "leret", "train", f"training/{algorithm}.yaml", "--run", str(run), *given]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def rounds() -> int:
        steps = (policies / f".killed-{algorithm}").glob("checkpoint-*/trainer_state.json")
        return max((int(path.parent.name.partition("-")[2]) for path in steps), default=0)

    whole, n_rounds = policies / f"whole-{algorithm}", size["max_steps"] // (4 if algorithm == "ppo" else 1)
    if begin(whole.name).wait():
        raise SystemExit("the training failed")
    at = []
    for moment in sorted(rng.uniform(0, n_rounds - 2) for _ in range(n_kills)):
        process = begin(f"killed-{algorithm}")
        while rounds() < moment and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 3))
        process.kill()
        process.wait()
        at.append(rounds())
    begin(f"killed-{algorithm}").wait()
    killed = policies / f"killed-{algorithm}"
    logs = [json.loads((path / "training.json").read_text())["log_history"] for path in (whole, killed)]
    weights = [[file.read_bytes() for file in sorted(path.rglob("*.safetensors"))] for path in (whole, killed)]
    print(f"{algorithm}: killed after checkpoints {at} of {n_rounds} rounds; logs equal: {logs[0] == logs[1]}, "
          f"weights equal: {weights[0] == weights[1]}")  # fmt: skip
    return logs[0] == logs[1] and weights[0] == weights[1]


def compare(
    n_questions: int, n_samples: int, n_kills: int, faults: float, seed: int, stall_s: float, timeout_s: float
) -> tuple[Outcome, bool]:
    """An undisturbed run and a disturbed one; whether they are equal and nothing finished was asked for again."""
    directory = Path(tempfile.mkdtemp(prefix="leret-kills-"))
    try:
        write_data(directory, n_questions)
        with server("--count") as url:
            finish(recipe_of(directory, url, n_samples, 60.0), directory / "whole")
            n_requests = told(url, "/count")["answered"]
        with server("--count", "--faults", str(faults), "--stall-s", str(stall_s), "--seed", str(seed)) as url:
            recipe = recipe_of(directory, url, n_samples, timeout_s)
            outcome = disturb(recipe, directory / "killed", url, n_requests, n_kills, seed)
        same = content(directory / "whole") == content(directory / "killed")
    finally:
        shutil.rmtree(directory)
    return outcome, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, help="sample its policy, in the process that is killed")
    parser.add_argument("--train", choices=["grpo", "rloo", "ppo", *PICKERS], help="an online algorithm, in --run")
    parser.add_argument("--run", type=Path, help="of --train: sampled, with an sft policy or a picker")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--samples", type=int, default=1, help="completions a prompt and state")
    parser.add_argument("--faults", type=float, default=0.0, help="share of faulty answers")
    parser.add_argument("--stall-s", type=float, default=30.0, help="of a stalled answer")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="policy.timeout_s")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.train is not None:
        sys.exit(0 if compare_training(asked.train, asked.run, asked.kills, asked.seed) else 1)
    preload()
    if asked.recipe is not None:
        outcome, same = compare_local(asked.recipe, asked.questions, asked.kills, asked.seed)
    else:
        outcome, same = compare(
            asked.questions, asked.samples, asked.kills, asked.faults, asked.seed, asked.stall_s, asked.timeout_s
        )
    print(json.dumps({**vars(outcome), "equal": same}))
    sys.exit(0 if same and not outcome.asked_twice else 1)


if __name__ == "__main__":
    main()
