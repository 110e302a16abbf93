"""A sampled run without sampling: states, completions and rewards put into the store by hand; and trainers."""

import copy
import json
import multiprocessing
import os
import random
import signal
from contextlib import suppress

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.sampling import SamplingRecipe
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Sample, State, digest
from leret.datasets.splits import split_of
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.store import PathStep, SamplingParams, Store
from leret.training.algorithms import ALGORITHMS
from leret.training.job import training_process
from leret.training.stage import make_job, open_environment, train
from leret.training.stored.trainer import TrainerInputs
from leret.training.watch import PEAK, RATE
from tests.tiny import WORDS

POLICY = "0" * 32
ONLINE = {"num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-3, "logging_steps": 1, "device": "cpu"}
LETTERS = [word for word in WORDS if word.isalpha()]


def fail():
    raise ZeroDivisionError


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def crash(run, recipe, step):
    """Train until an error at ``step``, which leaves the last checkpoint."""
    with suppress(ZeroDivisionError):
        train(recipe, run, progress=Stopper(step, fail))
        raise AssertionError("the training ended")


def kill_run(run, recipe, step):
    """Train in another process, killed at ``step``."""
    process = multiprocessing.get_context("spawn").Process(target=_train_until_killed, args=(run.path, recipe, step))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def _train_until_killed(path, recipe, step):
    train(recipe, Run.open(path), progress=Stopper(step, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def record(report):
    return json.loads((report.path / "training.json").read_text())


def log(report):
    """Return the log without the costs, which differ from run to run."""
    costs = (PEAK, RATE)
    return [
        {name: value for name, value in entry.items() if name not in costs} for entry in record(report)["log_history"]
    ]


def weights_of(directory):
    weights = load_file(directory / "model.safetensors")
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}


def bits(report):
    return weights_of(report.path), log(report)


class Stopper(Progress):
    def __init__(self, step=0, what=lambda: None):
        self.step, self.what, self.started, self.done, self.facts = step, what, [], 0, {}

    def start(self, stage, total):
        self.started.append((stage, total))

    def advance(self, n=1, **facts):
        self.done += n
        self.facts |= facts
        if self.done == self.step:
            self.what()


def nudge(model, scale=0.02, seed=1):
    """Add noise to the weights that are trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(scale * torch.randn(weight.shape, generator=generator))


def moved(model, scale=0.05):
    other = copy.deepcopy(model)
    nudge(other, scale)
    return other


def logp(model, prompt, completion):
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
    logps = torch.log_softmax(logits, dim=-1)
    return sum(logps[len(prompt) - 1 + i, token] for i, token in enumerate(completion))


def job_in(recipe, run):
    with open_environment(recipe, run) as environment:
        return make_job(recipe, run, environment)


def changed(recipe, **keys):
    return type(recipe)(**{**recipe.model_dump(), **keys})


def trainer_of(recipe, model, base, directory, pairs, max_steps=None):
    if recipe.learning_rate is None:  # a stage chooses it by the size of the model
        recipe = recipe.model_copy(update={"learning_rate": 1e-3})
    inputs = TrainerInputs(model, AutoTokenizer.from_pretrained(base), pairs, directory, "cpu", max_steps)
    with training_process(1):
        return ALGORITHMS[recipe.algorithm].make_trainer(recipe, inputs)


def trl_loss(recipe, base, directory, rows, policy):
    """Return the loss of TRL's trainer on the rows at the weights of ``policy``, and the model with its gradients."""
    trainer = trainer_of(recipe, AutoModelForCausalLM.from_pretrained(base), base, directory, rows)
    trainer.model.load_state_dict(policy.state_dict())
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    return float(loss.detach()), trainer.model


def same_gradients(policy, model):
    for ours, theirs in zip(policy.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3 * float(ours.grad.abs().max()))


def world_recipe(program, *, limit=8, policies=(), **sampling):
    return SamplingRecipe.model_validate({
        "data": {"kind": "world", "options": {"n_train": 20, "n_dev": 5, "n_test": 5}, "limit": limit},
        "policy": {"kind": "local", "model": "demo", "max_tokens": 12},
        "policies": dict(policies),
        "program": {"path": program, "adapter": {"kind": "compact"}},
        "sampling": {"prompts": 1, **sampling},
    })  # fmt: skip


def train_ids(n):
    return [id for id in (f"q{i}" for i in range(10 * n + 10)) if split_of(id) == "train"][:n]


def sampled_run(path, base, *, words=8, spread=True, system=""):
    """24 questions, each with one state and three completions of rewards 1, 0.5 and 0; all 0 without spread."""
    run = Run.create(path)
    policy, program = {"kind": "local", "model": str(base)}, {"path": "absent.py:Program"}
    data = {"kind": "jsonl", "seed": 0, "questions": "absent.jsonl", "corpus": "absent.jsonl"}
    run.update(sampling={"policy": policy, "data": data, "program": program}, digests={"policy": POLICY})
    rng = random.Random(0)
    head = ({"role": "system", "content": system},) if system else ()
    with Store(run.store) as store:
        for id in train_ids(24):
            asked = {"role": "user", "content": f"question: {_text(rng, rng.randint(3, words))}"}
            state = State(digest(id, "s"), id, 0, "write", {"question": id}, (*head, asked))
            samples = []
            for i, reward in enumerate((1.0, 0.5, 0.0)):
                text, own = _text(rng, 2 + i), digest(state.id, i)
                given = {"outputs": {"query": text}, "reward": reward * spread}
                samples.append(Sample(own, state.id, id, 0, "0", i, i, text, **given))
            store.put_state(state)
            store.put_samples(samples, SamplingParams("base", POLICY, "p", 1.0, 1.0, 16))
            store.put_visit(PathStep(id, 0, POLICY, state.id, None, None, "solved"))
    build_preferences(run)
    run.held_out.write_text("[]")
    return run


def _text(rng, n):
    return " ".join(rng.choice(LETTERS) for _ in range(n))
