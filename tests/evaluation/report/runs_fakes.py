import json

from leret.config.evaluation import EvalRecipe
from leret.core.runs import Run
from leret.core.types import Task
from leret.evaluation.results import ScoredHop, SystemResults, write_rows
from leret.evaluation.summary import summarise
from leret.evaluation.systems import System


def sampled(path, seed=0, k=3, corpus="C", beta=0.1, file="a.jsonl", **data):
    run = Run.create(path)
    data = {"kind": "jsonl", "seed": seed, "corpus": file, **data}
    run.update(
        sampling={"data": data, "retriever": {"k": k}, "sampling": {"seed": seed}},
        digests={"corpus": corpus},
        training={"ipo": {"recipe": {"beta": beta, "seed": seed}}},
    )
    return run


def hop(question, value):
    fault = "down" if value is None else None
    return ScoredHop(question, None, 0, 1, "x", "x", (), (), {} if fault else {"recall": value}, failure=fault)


def evaluated(path, scores, questions="Q", first=0, **settings):
    """Write a run with evaluated systems; ``scores`` has one value per question, None if the question failed."""
    run = sampled(path, **settings)
    names = [f"q{first + i}" for i in range(len(next(iter(scores.values()))))]
    results = {}
    for system, values in scores.items():
        hops = [hop(name, value) for name, value in zip(names, values, strict=True)]
        results[system] = SystemResults("key", hops)
        (run.eval / system).mkdir(parents=True)
        write_rows(run.eval / system / "per_question.parquet", hops, ["recall"])
    recipe = EvalRecipe(resamples=4000, baseline="base")
    systems = [(System(name, "policy"), its) for name, its in results.items()]
    summary = summarise(systems, [Task.question(name, "?") for name in names], ["recall"], recipe)
    facts = {"seed": 0, "split": "test", "data": questions, "focus": list(scores)[-1]}
    (run.eval / "summary.json").write_text(json.dumps(summary | facts))
    return run
