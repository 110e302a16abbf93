import numpy as np
import pytest
import torch
from scipy import stats

from leret.policies.local.sampling import choose, exponentials, step_keys


def keys(n):
    return step_keys(range(n), 1)[:, 0]


def drawn(logits, n, temperature=(1.0,), top_p=(1.0,), suppressed=None):
    repeated = [torch.tensor(values).repeat(n // len(values)) for values in (temperature, top_p)]
    ids, logprobs = choose(logits.repeat(n, 1), keys(n), *repeated, suppressed)
    return ids, logprobs.exp()


def logs(*probabilities):
    return torch.log(torch.tensor(probabilities))


def test_temperature_and_top_p_apply_by_row():
    ids, _ = drawn(logs(0.4, 0.6), 40, temperature=(0.0, 1.0))
    assert [set(ids[::2].tolist()), set(ids[1::2].tolist())] == [{1}, {0, 1}]
    # {1, 2} has .8 >= .6 and {1} has .5 < .6, so token 0 is out.
    ids, _ = drawn(logs(0.2, 0.5, 0.3), 100, top_p=(0.6, 1.0))
    assert [set(ids[::2].tolist()), set(ids[1::2].tolist())] == [{1, 2}, {0, 1, 2}]


def test_logprobs_ignore_temperature_top_p_and_suppression():
    ids, chances = drawn(logs(0.5, 0.3, 0.2), 50, (0.5,), (0.9,), torch.tensor([0]))
    assert set(ids.tolist()) == {1, 2}
    assert chances.tolist() == pytest.approx([0.3 if i == 1 else 0.2 for i in ids.tolist()], abs=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(2.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
def test_samples_follow_the_softmax_at_its_temperature_and_top_p(temperature, top_p):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    ids, _ = drawn(logits, 20_000, (temperature,), (top_p,))
    weights = torch.softmax(logits.double() / temperature, dim=0)
    if top_p < 1:  # .644, .237, .087, .032: the first two have .881, the third brings .968
        weights[2] = 0.0
    expected, counts = (weights / weights.sum() * 20_000).numpy(), torch.bincount(ids, minlength=4).numpy()
    assert counts[expected == 0].sum() == 0
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_neighbouring_draws_are_independent():
    table = step_keys(range(200), 50)
    ids, _ = choose(torch.zeros(table.size, 8), table.ravel(), torch.ones(table.size), torch.ones(table.size))
    counts = ids.reshape(table.shape).numpy()
    for one, other in [(counts[:-1], counts[1:]), (counts[:, :-1], counts[:, 1:])]:  # seeds, steps
        assert stats.chisquare(np.bincount((one * 8 + other).ravel(), minlength=64)).pvalue > 1e-3
    correlation = np.corrcoef(exponentials(table.ravel(), 64).numpy().T)[np.triu_indices(64, 1)]  # places
    assert np.abs(correlation).max() < 6 / np.sqrt(table.size)


def test_noise_is_the_same_on_every_machine_and_in_every_batch():
    # Computed with integers of Python, which know no overflow.
    assert step_keys([0], 1)[0, 0] == 0x8630C2BA6DAAB072
    golden = [0.5268987596704195, 0.4088697295742124]
    assert exponentials(step_keys([0], 1)[:, 0], 2)[0].tolist() == pytest.approx(golden, rel=1e-14)
    alone = exponentials(step_keys([2**63 + 5], 8)[:, 7], 4)
    assert torch.equal(exponentials(step_keys([1, 2**63 + 5, 3], 8)[:, 7], 900)[1, :4], alone[0])


def test_samples_of_a_large_vocabulary_follow_the_softmax():
    # As a trained model gives them: a few likely tokens, and 30,000 others with a tenth of the mass.
    logits, n = torch.randn(30_500, generator=torch.Generator().manual_seed(0)), 800
    logits[[5, 1023, 1024, 20_000, 30_499]] += torch.tensor([13.0, 11.0, 12.0, 12.5, 11.5])
    ids, _ = drawn(logits, n)
    edges = [0, 5, 6, 1023, 1024, 1025, 5000, 20_000, 20_001, 30_499, 30_500]
    weights = torch.softmax(logits.double(), dim=0).numpy()
    expected = np.add.reduceat(weights, edges[:-1]) / weights.sum() * n
    counts = np.histogram(ids.numpy(), bins=[*edges[:-1], edges[-1] + 1])[0]
    assert stats.chisquare(counts, expected).pvalue > 1e-3
