import random
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from leret.core.errors import RunError, TrainingError
from leret.core.progress import Progress
from models.pretrain import loop
from models.pretrain.loop import LoopSettings, Row, collate, train
from models.scratch import ScratchSettings
from tests.first_steps import read_lines
from tests.training.training_runs import Stopper, fail

SETTINGS = LoopSettings(steps=6, lr=1e-2, batch_tokens=64, pool_rows=8, warmup_steps=2, checkpoint_every=2, log_every=2)
SHAPE = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(seed=0):
    torch.manual_seed(seed)
    more = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **more, intermediate_size=24))


def tiny_opt():
    torch.manual_seed(0)
    more = {"word_embed_proj_dim": 16, "max_position_embeddings": 32, "do_layer_norm_before": False, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**SHAPE, **more, ffn_dim=24))


def stream(seed=0, n=1000):
    rng = random.Random(seed)
    for _ in range(n):
        prompt = tuple(rng.randrange(3, 20) for _ in range(rng.randint(2, 8)))
        yield Row(prompt, tuple((rng.choice(prompt), 2) for _ in range(rng.randint(1, 3))))


def crash(out, **keys):
    with pytest.raises(ZeroDivisionError):
        train(tiny(), stream(), SETTINGS, out, Stopper(6, fail), **keys)


def equal(one, two):
    return all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


def log(out):
    lines = read_lines(out / "pretrain.jsonl")
    return [{name: value for name, value in line.items() if name != "cpu_s"} for line in lines]


@pytest.mark.parametrize("make", [tiny, tiny_opt])
def test_targets_that_share_a_prompt_have_their_separate_losses(make):
    model = make()
    rows = [Row((5, 6, 7, 8), ((9, 10, 2), (6, 2), (7, 8, 9, 2))), Row((3, 4, 5, 6, 7, 8, 9), ((4, 4, 4, 4, 4, 4, 2),))]

    def apart(text, first):
        logits = model(torch.tensor([text])).logits[0, first - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(text[first:]), reduction="none")

    with torch.no_grad():
        targets = torch.cat([apart(row.prompt + target, len(row.prompt)) for row in rows for target in row.targets])
        prompts = torch.cat([apart(row.prompt, 1) for row in rows])
        together = [ScratchSettings(1, prompt_weight=weight).loss(model, collate(rows), 0) for weight in (0.0, 2.0)]
        plain = SETTINGS.loss(model, collate(rows), 0)
    expected = torch.stack([targets.mean(), targets.mean(), targets.mean() + 2 * prompts.mean()])
    assert torch.allclose(torch.stack([plain, *together]), expected, atol=1e-5)


def test_a_stopped_run_goes_on_to_bit_equal_weights(tmp_path):
    whole = tiny()
    train(whole, stream(), SETTINGS, tmp_path / "whole", Progress())
    crash(tmp_path / "parts")
    rest = tiny(seed=9)
    train(rest, stream(), SETTINGS, tmp_path / "parts", Progress())
    assert equal(whole, rest)
    assert log(tmp_path / "whole") == log(tmp_path / "parts")
    assert not (tmp_path / "parts" / "state.pt").exists()


def test_a_finished_run_is_left_as_it_is_and_does_not_go_on(tmp_path):
    train(tiny(), stream(), SETTINGS, tmp_path, Progress())
    before = (tmp_path / "model.safetensors").read_bytes()
    train(tiny(seed=1), stream(), SETTINGS, tmp_path, Progress())
    with pytest.raises(TrainingError, match=f"trained for {SETTINGS.steps} steps"):
        train(tiny(seed=1), stream(), replace(SETTINGS, steps=SETTINGS.steps + 6), tmp_path, Progress())
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_other_settings_or_data_are_refused_by_name(tmp_path):
    crash(tmp_path, data={"hop2": "a"})
    with pytest.raises(RunError, match=r"lr: 0\.01 in the run"):
        train(tiny(), stream(), replace(SETTINGS, lr=0.5), tmp_path, Progress(), data={"hop2": "a"})
    with pytest.raises(RunError, match="hop2: 'a' in the run, 'b' in the recipe"):
        train(tiny(), stream(), SETTINGS, tmp_path, Progress(), data={"hop2": "b"})


def test_few_negatives_hold_every_label_and_all_of_them_are_the_whole_loss():
    model = tiny()
    batch = collate([Row((3, 4, 5), ((6, 7, 2), (8, 2)))])
    few = loop.classes_of(model, batch, replace(SETTINGS, negatives=1), 0)
    assert few is not None
    assert set(batch.packed.ids.flatten().tolist()) <= set(few.tolist())
    chosen = (None, few, torch.arange(model.config.vocab_size))
    where = loop.hidden_states(model, batch), batch.target_at, batch.target_labels
    whole, sampled, everything = (loop.cross_entropy(model, *where, classes) for classes in chosen)
    assert sampled < whole
    assert torch.allclose(everything, whole)
    settings = replace(SETTINGS, steps=12, negatives=4)  # whose last steps take the whole vocabulary
    assert [loop.classes_of(model, batch, settings, step) is None for step in range(12)] == [False] * 10 + [True] * 2
