"""Kill `leret sample` repeatedly, and compare the result with an undisturbed run.

    python benchmarks/correctness/kills.py [--kills 20] [--faults 0.3] [--questions 400] [--samples 1]
    OMP_NUM_THREADS=1 python benchmarks/correctness/kills.py --recipe sampling/demo.yaml [--kills 20] [--questions 60]
    OMP_NUM_THREADS=1 python benchmarks/correctness/kills.py --train grpo --run RUN [--kills 10]

Each session is a separate process, killed by SIGKILL at a random moment of the run; the next session resumes the run.
At the end, the samples, the visits and the bytes of the preferences must equal those of an undisturbed run.

How "asked twice" is counted: the server names each request by its content, and each completion contains that name. The
completions in the store after a kill are finished. If the server receives one of their requests again, a finished
sample was asked for twice. Repeating a request that was in flight, or answered but not committed, is allowed and
counted. Repeating a request that got a faulty answer is a normal retry.

With --recipe, the recipe's own policy runs in the killed process. A kill comes up to a second after the store has a
random share of the samples. Kills may also come while the bank is built.

With --train (grpo, ppo, joint ...; RUN is a sampled run), `leret train` is killed up to three seconds after a random
checkpoint. Weights and log must equal those of an undisturbed training bit by bit.

The exit code is 0 if every comparison holds, else 1.
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

ROOT = Path(__file__).resolve().parents[2]
PICKERS = ("pick", "pqn")
WORDS = [f"{a}{b}" for a in ("al", "be", "co", "du", "er", "fi", "go", "hu") for b in ("ba", "ne", "ri", "so", "tu")]


@dataclass
class Outcome:
    """Result of a run that was killed.

    Attributes:
        asked_twice: requests of finished samples that the server received again; must be 0.
        repeated: requests, out of ``requests``, that the server answered well more than once.
        at: share of requests that were answered at each kill.
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
    """Run the instant server in another process, and yield its base URL."""
    command = [sys.executable, str(ROOT / "benchmarks/correctness/instant_server.py"), *arguments]
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
    """Write documents of invented words, and questions about two documents each."""
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
    """Write few-shot prompts, so that no bank is bootstrapped."""
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
            "program": {"path": f"{ROOT / 'pipelines/multihop.py'}:MultiHop", "hops": 2},
            "sampling": {
                "prompts": 4, "samples": n_samples, "bank": {"path": str(directory / "prompts")}, "max_error_rate": 0.5,
            },
        }
    )  # fmt: skip


def preload() -> None:
    """Import everything that a session needs, so that forked sessions start fast."""
    import pyarrow.parquet  # noqa: F401


def session(recipe: SamplingRecipe, path: Path) -> int:
    """Start the sampling stage in a forked process, and return its process id."""
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
    """Run sessions until no question is waiting, and return the number of sessions."""
    for n in range(1, 20):
        status = os.waitstatus_to_exitcode(os.waitpid(session(recipe, path), 0)[1])
        if status == 0:
            return n
        if status != 3:
            raise SystemExit(f"a session ended with status {status}")
    raise SystemExit("questions are still waiting after 19 sessions")


def finished(path: Path) -> set[str]:
    """Return the names of requests with committed completions."""
    return {name_in(text) for text in completions(path)}


def completions(path: Path) -> list[str]:
    """Return all committed completions."""
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
    """Return a run's content: the sorted rows of every table, and the bytes of the preferences."""
    with sqlite3.connect(f"{(path / 'rollouts.db').as_uri()}?mode=ro", uri=True) as database:
        tables = [
            sorted(database.execute(f"SELECT * FROM {name}"), key=repr) for name in ("states", "samples", "visits")
        ]
    database.close()
    return (*tables, (path / "preferences" / "train.parquet").read_bytes())


def disturb(recipe: SamplingRecipe, path: Path, url: str, n_requests: int, n_kills: int, seed: int) -> Outcome:
    """Sample to the end with ``n_kills`` kills on the way."""
    rng = random.Random(seed)
    outcome, began = Outcome(), time.monotonic()
    committed: dict[str, int] = {}  # times each finished request had been asked when first seen finished
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
    """Compare like `compare`, with the recipe's policy in the killed process."""
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
    """Return True if a killed online training ends like an undisturbed one."""
    size = {"max_steps": 176 if algorithm == "ppo" else 44, "save_steps": 2, "logging_steps": 1}
    if algorithm != "joint":
        size["learning_rate"] = 1e-3
    if algorithm not in (*PICKERS, "joint"):
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
    """Run with and without kills. Return the killed run's result, and True if both runs have the same content."""
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
    parser.add_argument("--recipe", type=Path, help="sample this recipe's policy, in the killed process")
    parser.add_argument(
        "--train",
        choices=["grpo", "rloo", "ppo", "joint", *PICKERS],
        help="kill the training of an online algorithm in --run",
    )
    parser.add_argument("--run", type=Path, help="sampled run with an sft policy or a picker, for --train")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--samples", type=int, default=1, help="completions per prompt and state")
    parser.add_argument("--faults", type=float, default=0.0, help="share of faulty answers")
    parser.add_argument("--stall-s", type=float, default=30.0, help="seconds that a stalled answer takes")
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
