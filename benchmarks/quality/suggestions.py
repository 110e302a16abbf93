"""Fit the weights of `pipelines.expand.WEIGHTS`, and compare the rule and pickers across retrievers.

    OMP_NUM_THREADS=1 python benchmarks/quality/suggestions.py fit --run RUN
    OMP_NUM_THREADS=1 python benchmarks/quality/suggestions.py transfer --run RUN [RUN ...]

Each RUN is a run of sampling/expand-pick.yaml; ``transfer`` evaluates every picker of every run in every run, on the
test split. ``fit`` tries up to 24 names at each state of the train questions, maximizes the expected recall that one
name adds under a softmax of linear scores, and prints the weights.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch

from benchmarks.quality.picking import Rule, difference, pickers, recalls
from leret.core.runs import Run
from leret.programs.mentions import mentions
from leret.programs.search import Found
from leret.rollouts.environment import Environment
from pipelines.expand import WEIGHTS, likely_names

NAMES, PASSES, STEPS = 24, 2, 1200


def states(environment):
    """Yield the features of each name of a state (n, n_weights) and the recall that each name adds (n,)."""
    tasks, search, rng = environment.tasks("train"), environment.retriever.search, random.Random(0)
    for _ in range(PASSES):
        found = [[ranking] for ranking in search([task.text for task in tasks], 3)]
        tried = [[] for _ in tasks]
        for _ in range(3):
            lists = [
                likely_names(t.text, Found(tuple(f)), w, NAMES) for t, f, w in zip(tasks, found, tried, strict=True)
            ]
            queries = [f"{t.text} {name}" for t, names in zip(tasks, lists, strict=True) for name in names or [""]]
            rankings = iter(search(queries, 8))
            for task, before, words, names in zip(tasks, found, tried, lists, strict=True):
                data = {one.text: one.data for one in mentions(task.text, Found(tuple(before)))}
                seen = {passage.doc_id for ranking in before for passage in ranking}
                new = [tuple(p for p in next(rankings) if p.doc_id not in seen)[:1] for _ in names or [""]]
                gains = [len({p.doc_id for p in one} & set(task.gold)) / len(set(task.gold)) for one in new]
                if names and max(gains):
                    yield [[float(data[name].get(key, 0)) for key in WEIGHTS] for name in names], gains
                at = 0
                while at < len(names) - 1 and rng.random() < 0.45:
                    at += 1
                before.append(new[at])
                words.extend(names[at : at + 1])


def fit(runs):
    with Environment.open(Run.open(runs[0])) as environment:
        rows = list(states(environment))
    x, gain = torch.zeros(len(rows), NAMES, len(WEIGHTS)), torch.zeros(len(rows), NAMES)
    for i, (features, gains) in enumerate(rows):
        x[i, : len(gains)], gain[i, : len(gains)] = torch.tensor(features), torch.tensor(gains)
    absent = torch.arange(NAMES) >= torch.tensor([[len(gains)] for _, gains in rows])
    torch.manual_seed(0)
    layer = torch.nn.Linear(len(WEIGHTS), 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(STEPS):
        loss = -(layer(x).squeeze(-1).masked_fill(absent, -1e9).softmax(-1) * gain).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(rows), "states with a gain, expected gain", round(-loss.item(), 4))
    for name, weight in zip(WEIGHTS, layer.weight[0].tolist(), strict=True):
        print(f"{name:22}{weight:6.1f}{WEIGHTS[name]:6.1f}")


def suggestion(one, step):
    return sum(weight * float(one.data.get(key, 0)) for key, weight in WEIGHTS.items()) if one.text else -1e9


def transfer(runs):
    for run in runs:
        with Environment.open(Run.open(run)) as environment:
            tasks = environment.tasks("test")
            raw = recalls(environment, Rule(lambda one, step: one.data.get("question", 0.0)), tasks)
            actors = {"rule": Rule(suggestion)}
            for other in runs:
                names = sorted(path.name for path in (other / "policies").iterdir() if path.is_dir())
                actors |= {f"{other.name} {name}": pickers(other, name) for name in names}
            print(run.name, "raw", round(float(np.mean(raw)), 3))
            for name, actor in actors.items():
                values = recalls(environment, actor, tasks)
                print(" ", name, round(float(np.mean(values)), 3), difference(values, raw), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fit", "transfer"])
    parser.add_argument("--run", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    {"fit": fit, "transfer": transfer}[options.what](options.run)
