"""Train and evaluate a MiniLM policy on HotpotQA for several seeds, with controls and baselines.

    python -m models pretrain sampling/hotpotqa.yaml --set data.questions=FILE --set data.corpus=FILE
    PYTHONPATH=. python benchmarks/quality/hotpotqa.py --seeds 0 1 2 --questions 250 --test 250

Each seed has its own training questions, sampling and training, from one pretrained policy. All seeds have the same
test questions. `copy` is the untrained policy with a prompt of demos that copy the question. ``--data`` is the folder
of queries_all.jsonl.gz and corpus.jsonl.gz. Finished runs are kept. Prints Markdown, and the CPU-minutes used.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.datasets.load import load_tasks
from leret.evaluation.statistics import bootstrap_intervals, sign_flip_p
from leret.programs.prompts import Prompt
from models.pretrain.heuristics import STYLES, Draft, corpus_idf

SYSTEMS = (
    "raw-question",
    "oracle-titles",
    "base",
    "bank:1",
    "bank:2",
    "bank:3",
    "copy",
    "sft-random",
    "sft",
    "sft-more",
    "ipo",
)
TRAININGS = ("minilm-sft", "minilm-sft-random", "minilm-ipo", "minilm-sft-more")
PAIRS = [
    ("ipo", "base"),
    ("ipo", "sft"),
    ("ipo", "sft-more"),
    ("ipo", "raw-question"),
    ("sft", "sft-random"),
    ("ipo", "copy"),
]


def leret(*arguments):
    subprocess.run([sys.executable, "-m", "leret", *map(str, arguments)], check=True)


def files(data):
    """Return overrides that set the data of the sampling recipe."""
    return [f"data.questions={data / 'queries_all.jsonl.gz'}", f"data.corpus={data / 'corpus.jsonl.gz'}"]


def copy_prompt(path, seed, data):
    """Write a prompt file with demos that copy training questions, to measure the base policy with it."""
    data = load_recipe("sampling/hotpotqa.yaml", SamplingRecipe, files(data)).data
    questions = [q.text for q in load_tasks(data.model_copy(update={"split": "train", "limit": 50}))]
    path.parent.mkdir(parents=True, exist_ok=True)
    rng, idf = random.Random(f"demos copy {seed}"), corpus_idf(questions)
    drawn = [(text, STYLES["copy"](Draft(text, (), idf, rng))) for text in rng.sample(questions, len(questions))]
    demos = [{"question": text, "query": query} for text, query in drawn if query][:3]
    Prompt("copy", {"write_query": demos}).save(path)


def run_seed(out, seed, n_questions, n_test, data):
    values = [f"data.limit={n_questions}", f"sampling.seed={seed}", *files(data)]
    leret("sample", "sampling/hotpotqa.yaml", "--run", out, *(part for value in values for part in ("--set", value)))
    for name in TRAININGS:
        leret("train", f"training/{name}.yaml", "--run", out, "--set", f"seed={seed}")
    copy_prompt(out.parent / f"copy-{seed}.json", seed, data)
    asked = ["--set", "systems=[raw-question,oracle-titles,base,policies]"]
    demos = ["--set", f"demos.copy={out.parent / f'copy-{seed}.json'}"]
    leret(
        "eval", "eval/hotpotqa.yaml", "--run", out, "--set", f"limit={n_test}", "--set", f"seed={seed}", *asked, *demos
    )
    return json.loads((out / "eval/summary.json").read_text())


def spread(values):
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def table(runs):
    print("| system | recall, hop 1 | recall, hop 2 | AP, hop 2 | all gold found | bridge titles found |")
    print("|---|---|---|---|---|---|")
    for name in SYSTEMS:
        rows = [row for run in runs for row in run["rows"] if row["system"] == name]
        if rows:
            cells = [spread([row["hops"][0]["recall"] for row in rows])]
            cells += [
                spread([row["hops"][-1][m] for row in rows]) for m in ("recall", "ap", "all_found", "bridge_found")
            ]
            print(f"| {name} | {' | '.join(cells)} |")


def differences(outs):
    print("\n| a | b | recall after hop 2: a - b, by seed (95 % interval, p) |\n|---|---|---|")
    for a, b in PAIRS:
        print(f"| {a} | {b} | {'; '.join(difference(out / 'eval', a, b) for out in outs)} |")


def difference(folder, a, b):
    """Return the paired difference, from the evaluation's results per question."""
    scores = [last_recall(folder / name / "per_question.parquet") for name in (a, b)]
    column = np.array([[scores[0][q] - scores[1][q]] for q in sorted(scores[0].keys() & scores[1].keys())])
    low, high = bootstrap_intervals(column)[0]
    return f"{column.mean():+.3f} [{low:+.3f}, {high:+.3f}] p={sign_flip_p(column)[0]:.4f}"


def last_recall(path):
    rows = pyarrow.parquet.read_table(path, columns=["question_id", "hop", "recall"]).to_pylist()
    return {row["question_id"]: row["recall"] for row in sorted(rows, key=lambda row: row["hop"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=250, help="number of training questions")
    parser.add_argument("--test", type=int, default=250, help="number of test questions")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/hotpotqa"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench/hotpotqa"))
    arguments = parser.parse_args()
    outs = [arguments.out / f"seed-{seed}" for seed in arguments.seeds]
    runs = [
        run_seed(out, seed, arguments.questions, arguments.test, arguments.data)
        for out, seed in zip(outs, arguments.seeds, strict=True)
    ]
    print(f"\n## HotpotQA, seeds {arguments.seeds}, mean (min-max), {runs[0]['n_questions']} test questions\n")
    table(runs)
    differences(outs)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nCPU-minutes of this call: {(used.ru_utime + used.ru_stime) / 60:.1f}")


if __name__ == "__main__":
    main()
