"""The estimate of a training's memory: against what it takes, and what is said where there is too little."""

import gc
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from leret.core.errors import TrainingError
from leret.core.memory import trim_malloc
from leret.training import memory
from leret.training.algorithms.preference import IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.data import Encoded
from leret.training.memory import FACTOR, check_memory, estimate_memory
from tests.training.training_runs import changed, trainer_of

STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def llama(hidden, layers, vocabulary=200):
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=4))


def kib(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", STATUS.read_text())[1])


@pytest.mark.skipif(not PEAK.exists(), reason="the kernel tells no peak of memory")
@pytest.mark.parametrize(
    ("recipe", "hidden", "layers", "length"),
    [
        (SFTRecipe(per_device_train_batch_size=2, learning_rate=1e-3), 768, 3, 20),  # weights
        (IPORecipe(per_device_train_batch_size=16, optim="sgd", learning_rate=1e-3), 128, 6, 150),  # activations
    ],
    ids=["weights", "activations"],
)
def test_the_estimate_is_right_to_its_factor(base, tmp_path, recipe, hidden, layers, length):
    n_sides, half = (1 if recipe.algorithm == "sft" else 2), length // 2
    examples = [
        Encoded([20 + i] * half, tuple([10 + side] * half for side in range(n_sides)))
        for i in range(recipe.per_device_train_batch_size)
    ]
    model = llama(hidden, layers)
    trainer = trainer_of(recipe, model, base, tmp_path, examples)
    trainer.args.max_steps = 2
    gc.collect()  # the trainer before
    trim_malloc()
    before = kib("VmRSS")
    PEAK.write_text("5")  # the peak begins here
    trainer.train()
    taken = kib("VmHWM") - before
    needed = sum(estimate_memory(model, recipe, examples, "cpu").values())
    assert taken / FACTOR < needed < taken * FACTOR, (taken >> 20, needed >> 20)


def test_parts_follow_from_weights_optimizer_and_batch():
    model = llama(64, 2)
    n = sum(weight.numel() for weight in model.parameters())
    short, long = Encoded([1] * 10, ([2] * 5,)), Encoded([1] * 100, ([2] * 20,))
    recipe = SFTRecipe(per_device_train_batch_size=1)
    part = estimate_memory(model, recipe, [short, long], "cpu")
    activations = 120 * 2 * (1024 + 768) * 4 + 20 * 3 * 200 * 4
    assert part == {"weights": 0, "gradients": 4 * n, "optimizer": 8 * n, "activations": activations}
    assert estimate_memory(model, recipe, [long], "cuda")["weights"] == 4 * n
    assert estimate_memory(model, recipe, [long], "cuda")["activations"] < activations
    assert estimate_memory(llama(64, 2).to("meta"), recipe, [long], "meta")["weights"] == 0  # they are there
    assert estimate_memory(model, changed(recipe, optim="sgd"), [long], "cpu")["optimizer"] == 0
    lora = changed(recipe, lora={"r": 1})
    assert estimate_memory(model, lora, [long], "cpu")["gradients"] == 4 * (2 * (4 * 128 + 3 * 192) + 264)


@pytest.mark.parametrize(
    ("estimate", "told"),
    [
        ({"weights": 0, "gradients": 3, "activations": 9}, "lower per_device_train_batch_size"),
        ({"weights": 4, "optimizer": 8, "activations": 1}, "set lora, or set optim: adafactor"),
    ],
)
def test_too_little_memory_says_which_key_to_lower(monkeypatch, caplog, estimate, told):
    monkeypatch.setattr(memory, "_available", lambda device: 10)
    check_memory(estimate, SFTRecipe(), "cpu")
    assert told in caplog.text
    monkeypatch.setattr(memory, "_available", lambda device: 5)
    with pytest.raises(TrainingError, match=told):
        check_memory(estimate, SFTRecipe(), "cpu")
    caplog.clear()
    monkeypatch.setattr(memory, "_available", lambda device: 100)
    check_memory(estimate, SFTRecipe(), "cpu")
    assert not caplog.text
