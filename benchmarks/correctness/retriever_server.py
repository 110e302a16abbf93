"""Test the retrieval server under load, and when it is killed.

    python benchmarks/correctness/retriever_server.py [--clients 64] [--seconds 60] [--data ../shared/data] [--kill]

Half of the clients are ``dspy.ColBERTv2`` (GET and POST), half are leret's client. Each client sends one question after
another, and checks that every answer has the same documents in the same order as the index in this process. In the
first phase the queue never fills, and no 503 may occur. In the second phase the queue holds 4 queries, and each 503
must come from the full queue.

With --kill, `leret sample` runs against a server that is killed (SIGKILL) during the run and restarted after three
seconds. The samples are compared with those of a run that searches the index directly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
K = 10


@contextmanager
def served(index: Path, *arguments: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``leret serve retriever``, and yield its URL and process."""
    command = [sys.executable, "-m", "leret", "serve", "retriever", str(index), "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    said = process.stdout.readline()
    if " at http" not in said:
        raise SystemExit(f"the server did not start: {said}")
    try:
        yield said.rsplit(" at ", 1)[1].strip(), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def read_data(folder: Path, scratch: Path) -> tuple[Path, list[str]]:
    """Return an index of HotpotQA's 29,082 documents, and questions; a generated world's if files are missing."""
    from leret.config.data import FileSettings, GeneratedSettings
    from leret.datasets.load import load
    from leret.retrieval.engines.bm25 import BM25

    hotpot = folder / "hotpotqa"
    if hotpot.is_dir():
        data = load(
            FileSettings(
                questions=str(hotpot / "queries_all.jsonl.gz"), corpus=str(hotpot / "corpus.jsonl.gz"), split="all"
            )
        )
    else:
        data = load(GeneratedSettings(split="all"))
    BM25.build(data.corpus, scratch / "index")
    return scratch / "index", [question.text for question in data.tasks]


def clients(url: str, expected: Path, kinds: list[str], seconds: float, seed: int, out: Path) -> None:
    """Run clients in one process, one thread per client, and write their figures to a file."""
    import dspy
    import requests

    from leret.config.retriever import RemoteSettings
    from leret.retrieval.clients.remote import Remote

    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
    want: dict[str, list[str]] = json.loads(expected.read_text())
    queries = list(want)
    told: list[tuple[str, str, float]] = []
    ready = threading.Barrier(len(kinds))

    def asker(kind: str) -> Any:
        if kind == "leret":
            remote = Remote(RemoteSettings(urls=(url,), retry_for_s=120))
            return lambda query: [passage.doc_id for passage in remote.search([query], K)[0]]
        server = dspy.ColBERTv2(url, post_requests=kind == "dspy-post")
        return lambda query: [passage["pid"] for passage in server(query, k=K)]

    def one(kind: str, number: int) -> None:
        rng, ask = random.Random(seed * 1000 + number), asker(kind)
        ready.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            query = rng.choice(queries)
            began = time.monotonic()
            try:
                found = ask(query)
                outcome = "ok" if found == want[query] else "empty" if not found else "wrong"
            except requests.HTTPError as error:
                outcome = str(error.response.status_code)
                time.sleep(0.05)
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error)[:100]}"
            told.append((kind, outcome, time.monotonic() - began))

    threads = [threading.Thread(target=one, args=(kind, i)) for i, kind in enumerate(kinds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.write_text(json.dumps(told))


def load_phase(url: str, expected: Path, n_clients: int, n_processes: int, seconds: float, scratch: Path) -> Any:
    """Run all clients in ``n_processes`` processes."""
    kinds = [("leret", "dspy-get", "leret", "dspy-post")[i % 4] for i in range(n_clients)]
    context = multiprocessing.get_context("spawn")
    outs = [scratch / f"told-{i}.json" for i in range(n_processes)]
    workers = [
        context.Process(target=clients, args=(url, expected, kinds[i::n_processes], seconds, i, out))
        for i, out in enumerate(outs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [tuple(row) for out in outs for row in json.loads(out.read_text())]


def metrics(url: str) -> dict[str, float]:
    """Return the server's counters."""
    import requests

    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def show(title: str, told: list[tuple[str, str, float]], seconds: float, counted: dict[str, float]) -> bool:
    """Print a phase's figures; return True if they meet the requirements."""
    outcomes = Counter(outcome for _, outcome, _ in told)
    print(f"\n{title}: {len(told):,} requests, {outcomes['ok'] / seconds:,.0f} answers/s")
    print(f"  outcomes: {dict(outcomes)}")
    for group in ("leret", "dspy"):
        times = sorted(s for kind, outcome, s in told if kind.startswith(group) and outcome == "ok")
        if times:
            cuts = [times[min(len(times) - 1, int(len(times) * share))] * 1000 for share in (0.5, 0.95, 0.99)]
            print(
                f"  {group:5}  p50 {cuts[0]:7.1f} ms  p95 {cuts[1]:7.1f} ms  p99 {cuts[2]:7.1f} ms  of {len(times):,}"
            )
    all_503 = sum(n for name, n in counted.items() if re.search(r'requests_total.*status="503"', name))
    full = counted["leret_rejected_total"]
    batches = counted["leret_batch_queries_count"]
    per_batch = counted["leret_batch_queries_sum"] / batches
    print(f"  503s {all_503:.0f}, of which the queue was full {full:.0f}; {per_batch:.2f} queries per batch")
    print(f"  load average {os.getloadavg()[0]:.1f}")
    return set(outcomes) <= {"ok", "503"} and all_503 == full


def load_test(args: argparse.Namespace, scratch: Path) -> bool:
    """Run both phases."""
    from leret.retrieval.load import open_index

    index, queries = read_data(args.data, scratch)
    rankings = open_index(index).search(queries, K)
    expected = scratch / "expected.json"
    answered = {q: [p.doc_id for p in r] for q, r in zip(queries, rankings, strict=True) if r}
    expected.write_text(json.dumps(answered))
    good = True
    for title, arguments, n, seconds in (
        (f"{args.clients} clients, {args.seconds:g} s", (), args.clients, args.seconds),
        (f"{args.clients} clients, a queue of 4, {args.seconds / 6:g} s", ("--set", "max_waiting=4"), args.clients,
         args.seconds / 6),
    ):  # fmt: skip
        with served(index, *arguments) as (url, process):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            told = load_phase(url, expected, n, args.processes, seconds, scratch)
            counted = metrics(url)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        good &= show(title, told, seconds, counted)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"  {spent:.1f} CPU-s of clients and server together")
        if not arguments:
            good &= all(outcome == "ok" for _, outcome, _ in told)
    return good


def samples_of(run: Path) -> list[Any]:
    """Return all samples of a run, ordered by id."""
    from leret.core.runs import Run
    from leret.sampling.store.store import Store

    with Store(Run.open(run).store, read_only=True) as store:
        return sorted((sample for group in store.groups() for sample in group.samples), key=lambda sample: sample.id)


def n_samples(run: Path) -> int:
    """Return the number of samples so far, while another process writes."""
    import sqlite3

    try:
        with sqlite3.connect(f"file:{run / 'rollouts.db'}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM samples").fetchone()[0])
    except sqlite3.Error:
        return 0


def kill_test(scratch: Path, limit: int) -> bool:
    """Compare `leret sample` on the index with `leret sample` on a server that is killed during the run."""
    from leret.config.data import GeneratedSettings
    from leret.datasets.load import load_corpus
    from leret.retrieval.engines.bm25 import BM25

    BM25.build(load_corpus(GeneratedSettings()), scratch / "world")
    shared = ["--set", f"data.limit={limit}", "--set", "sampling.prompts=1", "--set", "sampling.samples=4",
              "--set", "sampling.concurrency=8"]  # fmt: skip
    command = [sys.executable, "-m", "leret", "sample", "sampling/demo.yaml"]
    subprocess.run([*command, "--run", str(scratch / "local"), *shared], cwd=ROOT, check=True)
    with served(scratch / "world") as (url, process):
        port = int(url.rsplit(":", 1)[1])
        remote = ["--set", "retriever.kind=remote", "--set", f"retriever.urls=[{url}]",
                  "--set", "retriever.cache.use=off"]  # fmt: skip
        sampling = subprocess.Popen([*command, "--run", str(scratch / "remote"), *shared, *remote], cwd=ROOT)
        while n_samples(scratch / "remote") < limit and sampling.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
        at_kill = n_samples(scratch / "remote")
        time.sleep(3)
        waiting = sampling.poll() is None
        began = time.monotonic()
        with served(scratch / "world", port=port):
            code = sampling.wait(1200)
    ours, theirs = samples_of(scratch / "remote"), samples_of(scratch / "local")
    print(f"\nkilled after {at_kill:,} of {len(theirs):,} samples; 3 s without a server; sampling waited: {waiting}")
    print(f"ended {time.monotonic() - began:.1f} s later with code {code}; samples equal: {ours == theirs}")
    return waiting and code == 0 and ours == theirs


def main() -> None:
    """Run the phases; exit with 1 if a requirement is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="number of client processes")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--limit", type=int, default=60, help="questions for --kill")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="leret-server-"))
    try:
        good = kill_test(scratch, args.limit) if args.kill else load_test(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("passed" if good else "FAILED")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
