"""A run with samples of two questions, results of two systems, pairs, prompts and a training; texts are hostile."""

import json

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.core.types import Failure, Sample, State
from leret.evaluation.results import ScoredHop, write_rows
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.store import PathStep, SamplingParams, Store
from leret.viewer.collect import collect
from leret.viewer.index import RunIndex

EVIL = "<script>document.title = 'hacked'</script>\x07\u202etxet\u202c"
SHOWN = "&lt;script&gt;document.title = &#39;hacked&#39;&lt;/script&gt;[U+0007][U+202E]txet[U+202C]"
LINK = "javascript:document.title='hacked'"
ORIGIN = SamplingParams("base", "P1", "D", 1.0, 1.0, 8)
LATER = SamplingParams("sft", "P2", "D", 1.0, 1.0, 8)


def state(name, task_id, step=0, parent=None):
    text = f"find {EVIL}"
    return State(name, task_id, step, "write", {"question": text}, ({"role": "user", "content": text},), parent)


def sample(name, state_id, doc_ids=(), reward=None, query=None, step=0, **more):
    query = query or f"query {name}"
    failure = Failure("parse", f"bad {EVIL}") if reward is None else None
    values = {"reward": reward, "failure": failure, "components": {} if reward is None else {"recall": reward}}
    scores = tuple(float(9 - i) for i in range(len(doc_ids)))
    question_id = more.pop("question_id", "q1" if state_id.startswith("s") else "q2")
    ids = (name, state_id, question_id, step)
    fields = {"prompt": "0", "index": ord(name[0]), "seed": 0, "completion": query, "outputs": {"query": query}} | more
    return Sample(*ids, doc_ids=tuple(doc_ids), scores=scores, **fields, **values)


def write_store(run):
    with Store(run.store) as store:
        for one in (state("s0", "q1"), state("s1", "q1", 1, "b"), state("t0", "q2")):
            store.put_state(one)
        group = [
            sample("a", "s0", ("d1", "d2"), 1.0),
            sample("b", "s0", ("d3", "d1"), 0.5, EVIL),
            sample("b2", "s0", ("d3", "d1"), 0.5, EVIL, prompt="1"),
            sample("cc", "s0", query=LINK, outputs={}),
        ]
        store.put_samples(group, ORIGIN)
        store.put_samples([sample("later", "s0", ("d2",), 0.5)], LATER)
        tokens = {"token_ids": (5, 400, 2), "logprobs": (-0.25, -1.5, 0.0)}
        second = [
            sample("e", "s1", ("d1", "d3", "d2"), 1.0, step=1, **tokens),
            sample("ff", "s1", ("d3",), 0.0, step=1),
        ]
        store.put_samples(second, ORIGIN)
        store.put_samples([sample(n, "t0", ("d3",), 0.0, "same") for n in ("g", "hh")], ORIGIN)
        store.put_visit(PathStep("q1", 0, "P1", "s0", None, "b", "next"))
        store.put_visit(PathStep("q1", 1, "P1", "s1", "b", "e", "finished"))
        store.put_visit(PathStep("q2", 0, "P1", "t0", None, "g", "finished"))


def add_questions(run, names):
    """Add a sampled question for each state id, of any name."""
    with Store(run.store) as store:
        for state_id, name in names.items():
            store.put_state(state(state_id, name))
            store.put_samples([sample(f"of {state_id}", state_id, question_id=name)], ORIGIN)


def write_data(directory):
    documents = [{"doc_id": f"d{i}", "title": f"Title {i}", "text": f"text {i} {EVIL}"} for i in (1, 2, 3)]
    gold = {"q1": ["d1", "d2"], "q2": ["gone", "d2"], "q3": ["d1"]}
    questions = [{"id": n, "question": f"{n} {EVIL}", "relevant_doc_ids": ids} for n, ids in gold.items()]
    for name, rows in (("corpus", documents), ("questions", questions)):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_results(run):
    hop = {"hop": 1, "recall": 0.5, "ap": 0.5, "recall_ci": [0.4, 0.6], "ap_ci": [0.4, None]}
    row = {"n": 1, "failed": 0, "unparsed": 0, "seconds": 1.0, "lm_calls": 2, "hops": [hop]}
    row["cost"] = {"lm_calls": 2.0, "tokens": None, "searches": 1.5, "seconds": 0.25}
    for system, ap, ids in (("base", 0.5, ("d3", "d1")), ("ipo", 1.0, ("d1",))):
        rows = [ScoredHop("q3", None, 0, 1, f"find {system}", "x", ids, (1.0,) * len(ids), {"recall": 1.0, "ap": ap})]
        (run.eval / system).mkdir(parents=True)
        write_rows(run.eval / system / "per_question.parquet", rows, ["recall", "ap"])
    facts = {"n_questions": 1, "split": "test", "confidence": 0.95, "resamples": 100, "seed": 0}
    facts |= {"baseline": "base", "focus": "ipo", "n_hops": 1}
    facts |= {"comparisons": [], "leaks": {"verdict": f"leak check: none {EVIL}"}, "gold_coverage": 0.75}
    rows = [{"system": name, "kind": "base", **row} for name in ("base", "ipo")]
    (run.eval / "summary.json").write_text(json.dumps({"measures": ["recall", "ap"], "rows": rows, **facts}))


def build(directory):
    write_data(directory)
    files = {name: str(directory / f"{name}.jsonl") for name in ("questions", "corpus")}
    program = {"path": "pipelines/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}}
    data = {"kind": "jsonl", "split": "all", **files}
    recipe = SamplingRecipe.model_validate({"data": data, "program": program, "policy": {"model": "demo"}})
    run = Run.create(directory / "run")
    rounds = [{"policy": "base", "digest": "P1"}, {"policy": "sft", "digest": "P2"}]
    run.update(sampling=recipe.model_dump(mode="json"), digests={"policy": "P1"}, rounds=rounds)
    write_store(run)
    write_results(run)
    build_preferences(run)
    run.prompts.mkdir()
    for name, demos in (("0", {}), ("1", {"write": [{"question": f"demo {EVIL}"}]})):
        (run.prompts / f"{name}.json").write_text(json.dumps({"name": name, "demos": demos}, indent=1))
    (run.policies / "ipo").mkdir(parents=True)
    log = [{"step": i, "loss": 1 / i} for i in (1, 2, 3)]
    facts = {"algorithm": "ipo", "parent": "base", "examples": 2, "steps": 3, "seconds": 1.0, "log_history": log}
    alarm = {"name": "entropy", "step": 2, "message": f"fell {EVIL}"}
    (run.policies / "ipo" / "training.json").write_text(json.dumps({**facts, "alarms": [alarm]}))
    return run


@pytest.fixture
def run(tmp_path):
    return build(tmp_path)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("viewer")
    one = build(directory)
    collect(one, directory / "facts.db")
    return one, directory / "facts.db"


@pytest.fixture
def index(shared, tmp_path):
    with_facts = RunIndex(shared[0], tmp_path / "index.db")
    with_facts.use(shared[1])
    yield with_facts
    with_facts.close()
