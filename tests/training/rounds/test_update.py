import math
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.training import LoraSettings
from leret.core.errors import TrainingError
from leret.policies.checkpoints import model_digest
from leret.training.algorithms import ALGORITHMS
from leret.training.model import InitialPolicy, save_policy
from leret.training.rounds.grpo import GRPORecipe
from leret.training.rounds.rloo import RLOORecipe
from leret.training.rounds.update import Reference, RolloutBatch, Update, load_trainable
from tests.training.training_runs import nudge

PROMPTS = ([3, 20, 21, 22, 4], [3, 30, 31, 32, 33, 34, 35, 4])


def initial(path):
    return InitialPolicy(path.name, path, model_digest(path))


def make(path, recipe=None, *, lora=None, with_reference=False, size=64, rate=0.0):
    model, tokenizer = load_trainable(initial(path), lora, "float32", "cpu")
    reference = Reference(model, initial(path), lora) if with_reference else None
    given = {"learning_rate": rate, "max_grad_norm": math.inf, "per_device_train_batch_size": size, "optim": "sgd"}
    recipe = (recipe or GRPORecipe()).model_copy(update=given)
    objective = ALGORITHMS[recipe.algorithm].objective
    return Update(model, tokenizer.pad_token_id, recipe, objective, reference=reference)


def batch(lengths=(3, 7, 5, 2, 6, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(6, 60, (n,), generator=generator).tolist() for n in lengths]
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    plain = RolloutBatch.of([(PROMPTS[g], ids) for g, ids in zip(groups.tolist(), made, strict=True)], groups)
    return replace(plain, advantages=torch.tensor([1.0, -0.5, 0.2, -1.0, 0.7, 0.3])[:, None] * plain.mask)


def trl_inputs(given):
    """As TRL's trainers hold a batch: prompts padded at the left, completions at the right."""
    prompts, completions = ([torch.tensor(pair[side]) for pair in given.sequences] for side in (0, 1))
    prompt_ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids > 0).long(),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": given.mask.long(),
        "advantages": given.advantages[:, 0],
        "num_items_in_batch": given.mask.sum(),
    }


def trl_trainer(path, tmp_path, kind, model, more=None, **keys):
    import trl
    from datasets import Dataset

    if more is None:
        more = {"reward_funcs": lambda **_: [0.0]}
        keys["num_generations"] = 2
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2, **keys
    )
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    rows = Dataset.from_list([{"prompt": "a"}] * 2)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, **more
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def same_gradients(update, model, tolerance=1e-5):
    found = dict(update.model.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.allclose(found[name].grad.double(), weight.grad.double(), atol=tolerance), name


def same_update(update, given, trainer, inputs, beta=0.0):
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert update.step(given, beta)["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    same_gradients(update, trainer.model)


def test_one_update_of_rloo_is_that_of_trl(base, tmp_path):
    given, update = batch(), make(base, RLOORecipe())
    given = replace(given, old_logps=update.evaluate(given)[0])
    nudge(update.model, 0.005)
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = trl_trainer(base, tmp_path, "RLOO", model, beta=0.0)
    nudge(model, 0.005)
    same_update(update, given, trainer, {**trl_inputs(given), "old_logps": given.old_logps.sum(1)})


def test_completions_without_an_advantage_are_not_run_and_change_nothing(base, monkeypatch):
    given, whole = batch(), batch()
    given.advantages[3:] = whole.advantages[3:] = 0
    update, run = make(base), []
    forward = update._forward
    monkeypatch.setattr(update, "_forward", lambda model, part: run.extend(part.sequences) or forward(model, part))
    loss = update.step(given)["loss"]
    other = make(base, GRPORecipe(entropy_coef=1e-12))
    assert other.step(whole)["loss"] == pytest.approx(loss, abs=1e-6)
    same_gradients(update, other.model)
    assert len(run) == 3
    given.advantages[:] = 0
    assert update.step(given) == {}


def test_a_loss_that_is_no_number_is_an_error(base):
    given = batch()
    given.advantages[0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"the loss is nan.*lower learning_rate"):
        make(base).step(given)


@pytest.mark.parametrize("saved", [False, True])
def test_the_reference_of_an_adapter_is_the_initial_policy_without_a_second_base(base, tmp_path, saved):
    lora, path = LoraSettings(r=2, alpha=4), base
    if saved:
        model, tokenizer = load_trainable(initial(base), lora, "float32", "cpu")
        nudge(model, 0.1)
        path = tmp_path / "adapter"
        save_policy(model, tokenizer, path)
    update = make(path, lora=lora, with_reference=True, rate=0.5)
    given = batch()
    first = update.evaluate(given)[0]
    assert torch.equal(update.evaluate(given, reference=True)[0], first)
    n_base = sum(weight.numel() for name, weight in update.model.named_parameters() if "lora" not in name)
    update.step(given)
    assert not torch.allclose(update.evaluate(given)[0], first, atol=1e-4)
    assert torch.equal(update.evaluate(given, reference=True)[0], first)
    assert n_base == sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(base).parameters())
    assert all("lora" in name for name in update.trainable_parameters())


def test_the_mismatch_with_the_sampler_is_measured_once_at_temperature_1(base):
    update, given, shift = make(base), batch(), 0.4
    logps = update.evaluate(given)[0]
    rows = [logps[i, : len(ids) - 1] - shift for i, (_, ids) in enumerate(given.sequences)]  # the last is not sent
    sent = RolloutBatch.of(given.sequences, given.groups, [row.tolist() for row in rows])
    given = replace(given, sampler_logps=sent.sampler_logps)
    update.temperature = 0.5
    update.step(given)
    found = update.mismatch()
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(shift, abs=1e-5)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(shift, abs=1e-5)
    assert found["sampling/sampling_logp_difference/outliers"] == 1
    # Completions of 2 to 7 tokens, of which all but the last are compared.
    assert found["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(shift), rel=1e-4)
    assert found["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(6 * shift), rel=1e-4)
    update.step(replace(given, old_logps=logps))
    assert update.mismatch() == {}, "a later step is not compared"
