"""Compare leret.LeReT with DSPy's optimizers at equal LM calls, on several programs in the demo's world.

    python benchmarks/quality/optimizer.py --seeds 0 1 2 --out runs/bench/optimizer
    python benchmarks/quality/optimizer.py --programs two --systems LeReT LeReT-grpo BootstrapFinetune BootstrapRS
    python benchmarks/quality/optimizer.py --policy agent --programs react tutorial --parsed
    python benchmarks/quality/optimizer.py --policy agent --answers --test 200

LeReT runs with its defaults (SFT, then IPO, with eight completions per call), LeReT-grpo with ``algorithms=["grpo"]``.
The other optimizers get as many LM calls as LeReT made. BootstrapRS bootstraps and selects with the program's LM at
temperature 1, BootstrapRS-greedy at temperature 0.

The policy is a shipped policy. Each seed has its own world, sampling and training. The score is recall of gold
documents on held-out questions with greedy decoding. The interval is for the difference to the untrained program on
the same questions (paired bootstrap, 95 %). The agent (react) is scored by the mean of recall and exact match of its
answer. Prints Markdown, and keeps finished results in --out.

--parsed instead counts how many sampled completions the untrained programs' adapter can parse. --answers instead
shows recall, exact match and F1 of the agent separately, before and after LeReT.
"""

import argparse
import json
import time
from pathlib import Path

import dspy
import numpy as np
from dspy.evaluate.metrics import EM, F1
from dspy.teleprompt import BootstrapFewShotWithRandomSearch, BootstrapFinetune
from dspy.utils.callback import BaseCallback

import leret
from leret.config.data import DataSettings
from leret.config.retriever import BM25Settings
from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.datasets.load import load_corpus, load_tasks
from leret.evaluation.statistics import bootstrap_intervals
from leret.retrieval.load import load_retriever

BOOTSTRAP_CALLS = 55
"""Measured LM calls to bootstrap one candidate of the random search."""

FINETUNE = {"learning_rate": 1e-3, "max_length": 512, "warmup_ratio": 0.05}
"""Training keys for `leret.Provider`, which DSPy's optimizers pass on."""

TRAINING = {
    "demo": {},
    "agent": {
        "max_length": 1024,
        "warmup_ratio": 0.05,
        "sft": {"learning_rate": 5e-4, "num_train_epochs": 3},
        "ipo": {"learning_rate": 1e-4},
    },
}


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField()
    query: str = dspy.OutputField()


class Loop(dspy.Module):
    """Calls one predictor per hop, as in the README's first example."""

    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question, context: list[str] -> query")
        self.search = leret.Search(k=3)

    def forward(self, question):
        found = leret.Found()
        for _ in range(2):
            found = self.search(self.write(question=question, context=found.passages).query, found)
        return dspy.Prediction(doc_ids=found.doc_ids)


class Two(dspy.Module):
    """Calls a different predictor at each hop, with a different signature."""

    def __init__(self):
        super().__init__()
        self.first, self.second = dspy.Predict("question -> query"), dspy.Predict(WriteQuery)
        self.search = leret.Search(k=3, exclude_seen=True)

    def forward(self, question):
        found = self.search(self.first(question=question).query)
        found = self.search(self.second(question=question, context=found.passages).query, found)
        return dspy.Prediction(doc_ids=found.doc_ids)


class Tutorial(dspy.Module):
    """Works like DSPy's multi-hop tutorial: notes grow from hop to hop.

    Policy agent also writes the notes; with policy demo, a frozen LM writes them.
    """

    def __init__(self):
        super().__init__()
        self.generate_query = dspy.Predict("question, context: list[str] -> query")
        self.append_notes = dspy.Predict("question, context: list[str] -> new_notes")
        self.search = leret.Search(k=3, exclude_seen=True)

    def forward(self, question):
        notes, found = [], leret.Found()
        for _ in range(2):
            found = self.search(self.generate_query(question=question, context=notes).query, found)
            passages = [passage.text for passage in found.searches[-1]]
            notes = [*notes, self.append_notes(question=question, context=passages).new_notes]
        return dspy.Prediction(doc_ids=found.doc_ids)


class Branch(dspy.Module):
    """Calls a second predictor if the first search found no name of the question."""

    def __init__(self):
        super().__init__()
        self.write, self.rephrase = dspy.Predict(WriteQuery), dspy.Predict("question, context: list[str] -> query")
        self.search = leret.Search(k=3, exclude_seen=True)

    def forward(self, question):
        found = self.search(self.write(question=question, context=[]).query)
        names = {word.strip("?,.") for word in question.split()[1:] if word[0].isupper()}
        missing = [name for name in names if not any(name in title for title in found.titles)]
        predictor = self.rephrase if missing else self.write
        found = self.search(predictor(question=question, context=found.passages).query, found)
        return dspy.Prediction(doc_ids=found.doc_ids)


class React(dspy.Module):
    """An agent with a search tool that answers the question (for policy agent)."""

    def __init__(self):
        super().__init__()
        self.search = leret.Search(k=3)
        self.agent = dspy.ReAct("question -> answer", tools=[self.look_up], max_iters=4)

    def look_up(self, query: str) -> list[dict]:
        """Passages for a query."""
        return [{"doc_id": p.doc_id, "title": p.title, "text": p.text} for p in self.search(query).ranking]

    def forward(self, question):
        done = self.agent(question=question)
        rows = [row for seen in done.trajectory.values() if isinstance(seen, list) for row in seen]
        return dspy.Prediction(doc_ids=[row["doc_id"] for row in rows], answer=done.answer)


PROGRAMS = {"loop": Loop, "two": Two, "branch": Branch, "tutorial": Tutorial, "react": React}
LERET = {"LeReT": {}, "LeReT-grpo": {"algorithms": ["grpo"]}, "LeReT-4": {"prompts": 4, "samples": 2}}
POLICIES = {  # adapter, sampling
    "demo": (leret.CompactAdapter(), {"max_tokens": 16}),
    "agent": (leret.CompactAdapter(outputs=True), {"max_tokens": 96, "temperature": 1.0}),
}


def take_notes(request):
    """A frozen LM that returns the first passage of its prompt. The prompt's first line is the question."""
    lines = messages_of(request)[-1]["content"].split("\n")
    return text_response(request, lines[2] if len(lines) > 2 else "nothing")


class Finetune(BootstrapFinetune):
    """Drops runs that did not parse. The stock optimizer takes their score of -1 for a success, and then fails."""

    def _prepare_finetune_data(self, trace_data, lm, pred_ind=None):
        return super()._prepare_finetune_data([run for run in trace_data if run["score"] > 0], lm, pred_ind)


class Calls(BaseCallback):
    """Counts LM calls, and the completions that parsed."""

    n = n_parsed = 0

    def on_lm_start(self, call_id, instance, inputs):
        self.n += 1

    def on_adapter_parse_end(self, call_id, outputs, exception=None):
        self.n_parsed += exception is None


def recall(example, prediction, trace=None):
    found = len(set(prediction.doc_ids) & set(example.gold)) / len(example.gold)
    if "answer" not in prediction:
        return found
    return (found + (prediction.answer.lower() in [answer.lower() for answer in example.answers])) / 2


def student_of(name, policy):
    program = PROGRAMS[name]()
    program.set_lm(leret.LM(policy, **POLICIES[policy][1]))
    if name == "tutorial" and policy == "demo":
        program.append_notes.lm = EngineLM("notes", take_notes)
    return program


def world(seed, cache):
    data = DataSettings.model_validate({"kind": "world", "seed": seed})
    splits = {}
    for split in ("train", "dev", "test"):
        tasks = load_tasks(data.model_copy(update={"split": split}))
        splits[split] = [
            dspy.Example(question=t.text, gold=list(t.gold), answers=list(t.answers)).with_inputs("question")
            for t in tasks
        ]
    return splits, load_retriever(BM25Settings(k=3), load_corpus(data), cache)


def score(program, examples, temperature=0.0):
    """Return recall (n_examples,), with greedy decoding by default. Failed examples count 0."""
    cold = program.deepcopy()
    for predictor, own in zip(cold.predictors(), program.predictors(), strict=True):
        predictor.lm = own.lm.copy(temperature=temperature)

    return [float(value) for *_, value in evaluated(cold, examples)]


def evaluated(program, examples):
    return dspy.Evaluate(devset=examples, metric=recall, num_threads=16, max_errors=10**9)(program).results


def optimize(system, name, seed, splits, options, n_calls, out):
    """Return the optimized program and its number of LM calls. ``n_calls`` is LeReT's number of calls."""
    student, train, val = (
        student_of(name, options.policy),
        splits["train"][: options.train],
        splits["dev"][: options.val],
    )
    training = TRAINING[options.policy]
    calls, keys = Calls(), {**FINETUNE, "seed": seed}
    a_run = 4 if name in ("tutorial", "react") else 2
    a_val = a_run * len(val)
    with dspy.context(callbacks=[calls]):
        if system in LERET:
            optimizer = leret.LeReT(
                reward="ap", metric=recall, seed=seed, run_dir=out, train_kwargs=training, **LERET[system]
            )
            best = optimizer.compile(student, trainset=train, valset=val)
            return best, sum(entry.get("lm_calls", 0) for entry in best.trial_logs)
        if system == "BootstrapFinetune":
            times = max(1, round(n_calls / (a_run * len(train))))
            optimizer = Finetune(metric=lambda *of: recall(*of) == 1, train_kwargs={**keys, "run_dir": out})
            best = optimizer.compile(student, trainset=train * times)
        elif system in ("MIPROv2", "GEPA"):
            best = propose(system, student, train, val, seed, n_calls // a_val)
        else:
            optimizer = BootstrapFewShotWithRandomSearch(
                metric=recall, metric_threshold=1.0, max_labeled_demos=0, max_bootstrapped_demos=3, num_threads=16,
                num_candidate_programs=round((n_calls - 3 * a_val) / (a_val + BOOTSTRAP_CALLS)), max_errors=10**9,
            )  # fmt: skip
            tried = student.deepcopy()
            for predictor in tried.predictors() if system == "BootstrapRS-greedy" else ():
                predictor.lm = predictor.lm.copy(temperature=0.0)
            with dspy.context(lm=tried.predictors()[0].lm):
                best = optimizer.compile(tried, trainset=train, valset=val)
            for predictor, own in zip(best.predictors(), student.predictors(), strict=True):
                predictor.lm = own.lm
    return best, calls.n


def propose(system, student, train, val, seed, n_trials):
    """Run an optimizer with LM proposals. The program's LM, pretrained on queries, writes the proposals."""
    lm, none = student.predictors()[0].lm, {"max_bootstrapped_demos": 0, "max_labeled_demos": 0}
    if system == "MIPROv2":
        optimizer = dspy.MIPROv2(
            metric=recall, prompt_model=lm, task_model=lm, auto=None, num_candidates=6, num_threads=16, seed=seed,
            max_errors=10**9, verbose=True, **none,
        )  # fmt: skip
        best = optimizer.compile(student, trainset=train, valset=val, num_trials=n_trials, minibatch=False, seed=seed)
    else:
        optimizer = dspy.GEPA(
            metric=lambda example, prediction, trace=None, name=None, steps=None: recall(example, prediction),
            reflection_lm=lm, max_metric_calls=n_trials * len(val), num_threads=16, seed=seed,
        )  # fmt: skip
        best = optimizer.compile(student, trainset=train, valset=val)
    print([predictor.signature.instructions for predictor in best.predictors()])
    return best


def run(system, name, seed, options, n_calls):
    out = (options.out / f"{name}-{seed}-{system}{'' if options.policy == 'demo' else '-' + options.policy}").resolve()
    done = out / "row.json"
    if done.is_file():
        return json.loads(done.read_text())
    splits, rm = world(seed, options.out / "cache")
    began = time.time()
    with dspy.context(adapter=POLICIES[options.policy][0], rm=rm):
        try:
            best, calls = (
                (student_of(name, options.policy), 0)
                if system == "base"
                else optimize(system, name, seed, splits, options, n_calls, out / "run")
            )
            seconds = time.time() - began
            if system != "base" and not calls:
                raise RuntimeError("no LM call was made, and the program is unchanged")
            row = {"calls": calls, "seconds": seconds, "values": score(best, splits["test"][: options.test])}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:160]}
    out.mkdir(parents=True, exist_ok=True)
    done.write_text(json.dumps(row))
    return row


def print_parsed(options):
    print("| program | seed | calls | parsed | score, sampled |")
    print("|---|---|---|---|---|")
    for name in options.programs:
        for seed in options.seeds:
            splits, rm = world(seed, options.out / "cache")
            calls = Calls()
            with dspy.context(adapter=POLICIES[options.policy][0], rm=rm, callbacks=[calls]):
                values = score(
                    student_of(name, options.policy),
                    splits["test"][: options.test],
                    temperature=POLICIES[options.policy][1].get("temperature", 1.0),
                )
            share = f"{calls.n_parsed / calls.n:.3f} | {np.mean(values):.3f}"
            print(f"| {name} | {seed} | {calls.n} | {share} |", flush=True)


def print_answers(options):
    print("| seed | measure | before | after | difference (95 %) |")
    print("|---|---|---|---|---|")
    for seed in options.seeds:
        splits, rm = world(seed, options.out / "cache")
        with dspy.context(adapter=POLICIES["agent"][0], rm=rm):
            programs = [student_of("react", "agent")]
            run_dir = (options.out / f"answers-{seed}").resolve()
            programs.append(optimize("LeReT", "react", seed, splits, options, 0, run_dir)[0])
            before, after = (parts(program, splits["test"][: options.test]) for program in programs)
        for name, a, b in zip(("recall", "EM", "F1"), before.T, after.T, strict=True):
            low, high = bootstrap_intervals((b - a)[:, None])[0]
            difference = f"{(b - a).mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            print(f"| {seed} | {name} | {a.mean():.3f} | {b.mean():.3f} | {difference} |", flush=True)


def parts(program, examples):
    """Return recall, exact match and F1 (n_examples, 3) with greedy decoding. Failed examples count 0."""
    cold = program.deepcopy()
    cold.set_lm(program.predictors()[0].lm.copy(temperature=0.0))
    rows = []
    for example, prediction, _ in evaluated(cold, examples):
        found, answer = set(prediction.get("doc_ids", ())), prediction.get("answer", "") or ""
        share = len(found & set(example.gold)) / len(example.gold)
        rows.append((share, EM(answer, example.answers), F1(answer, example.answers)))
    return np.array(rows, float)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--systems", nargs="+", default=["LeReT"])
    parser.add_argument("--train", type=int, default=150)
    parser.add_argument("--val", type=int, default=50)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--policy", choices=POLICIES, default="demo")
    parser.add_argument("--parsed", action="store_true")
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/optimizer"))
    options = parser.parse_args()
    if options.parsed:
        return print_parsed(options)
    if options.answers:
        return print_answers(options)
    print("| program | seed | system | recall | difference to base (95 %) | LM calls | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in options.programs:
        for seed in options.seeds:
            base = run("base", name, seed, options, 0)
            n_calls = run("LeReT", name, seed, options, 0).get("calls", 1000)
            for system in ("base", *options.systems):
                row = run(system, name, seed, options, n_calls)
                if "error" in row:
                    print(f"| {name} | {seed} | {system} | failed: {row['error']} | | | |", flush=True)
                    continue
                values, difference = np.array(row["values"]), np.array(row["values"]) - np.array(base["values"])
                low, high = bootstrap_intervals(difference[:, None])[0]
                figures = f"{difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]" if system != "base" else ""
                figures += f" | {row['calls']} | {row['seconds']:.0f}"
                print(f"| {name} | {seed} | {system} | {values.mean():.3f} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
