from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.rollouts.rounds import Sampled
from leret.training.rounds import ppo
from leret.training.rounds.ppo import PPORecipe
from tests.training.rounds.test_update import batch, make, same_gradients
from tests.training.training_runs import nudge


def ppo_oracle(model, head, given, scores, old_logps, old_values, reference):
    """What TRL 1.12 computes where all completions fill their room, in float64 from the plain forward."""
    prompts, ids = zip(*given.sequences, strict=True)
    logps, values = [], []
    for prompt, completion in zip(prompts, ids, strict=True):
        output = model(input_ids=torch.tensor([[*prompt, *completion]]), output_hidden_states=True)
        at = slice(len(prompt) - 1, -1)
        chances = output.logits[0, at].log_softmax(-1)
        logps.append(chances.gather(-1, torch.tensor(completion)[:, None])[:, 0])
        values.append((output.hidden_states[-1][0, at] @ head.weight.double().T)[:, 0] + head.bias.double())
    new, value = torch.stack(logps), torch.stack(values)
    rewards = -0.05 * (old_logps - reference)
    rewards[:, -1] += scores
    width, last, reverse = rewards.shape[1], torch.zeros(len(rewards)).double(), []
    for t in range(width - 1, -1, -1):
        following = old_values[:, t + 1] if t < width - 1 else 0.0
        last = rewards[:, t] + following - old_values[:, t] + 0.95 * last
        reverse.append(last)
    advantages = torch.stack(reverse[::-1], dim=1)
    returns = advantages + old_values
    advantages = (advantages - advantages.mean()) * torch.rsqrt(advantages.var() + 1e-8)
    near = torch.clamp(value, old_values - 0.2, old_values + 0.2)
    assert 0 < (near != value).sum() < value.numel()
    of_values = 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2).mean()
    ratio = (new - old_logps).exp()
    assert 0 < (ratio != ratio.clamp(0.8, 1.2)).sum() < ratio.numel()
    of_policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    return of_policy + 0.1 * of_values, of_policy, of_values


def test_one_update_of_ppo_is_that_of_trl_1_12(base):
    recipe = PPORecipe(learning_rate=1e-3)
    update = make(base, recipe, with_reference=True)
    head = update.value_head
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    given = batch(lengths=(5,) * 6)
    nudge(update.model, seed=3)
    logps, values = update.evaluate(given)
    given = replace(given, old_logps=logps, values=values, reference=update.evaluate(given, reference=True)[0])
    scores = torch.tensor([1.0, 0.5, 0.0, -3.5, 5.0, 0.25])
    parts = Sampled(given.sequences, given.groups, scores, scores[:, None], {})
    given = ppo.advantages(recipe, parts, given, recipe.beta)
    nudge(update.model, 0.1, seed=4)
    found = update.step(given)

    model = AutoModelForCausalLM.from_pretrained(base).double()
    model.load_state_dict({name: weight.double() for name, weight in update.model.state_dict().items()})
    tables = [table.double() for table in (given.old_logps, given.values, given.reference)]
    loss, of_policy, of_values = ppo_oracle(model, head, given, scores.double(), *tables)
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert found["policy_loss"] == pytest.approx(float(of_policy.detach()), abs=1e-5)
    assert found["value_loss"] == pytest.approx(float(of_values.detach()), abs=1e-5)
    same_gradients(update, model)
