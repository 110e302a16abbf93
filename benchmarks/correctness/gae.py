"""Compare leret's generalised advantages with torchrl's: print the largest difference over random cases.

    pip install torchrl && python benchmarks/correctness/gae.py

Cases have lengths 1 to 12, gamma from .9 to 1 and lambda from 0 to 1, in float64.
"""

import argparse
import random

import torch
from torchrl.objectives.value.functional import generalized_advantage_estimate

from leret.training.rounds.advantages import lambda_returns


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    given = parser.parse_args()
    rng, worst = random.Random(0), 0.0
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    for _ in range(given.cases):
        n, gamma, lam = rng.randint(1, 12), rng.uniform(0.9, 1.0), rng.random()
        rewards, values = torch.randn(1, n), torch.randn(1, n)
        ours = lambda_returns(rewards, values, torch.ones(1, n), gamma, lam) - values
        following = torch.cat([values[0, 1:], torch.zeros(1)])
        done = torch.zeros(n, dtype=torch.bool)
        done[-1] = True
        theirs, _ = generalized_advantage_estimate(
            gamma, lam, *(table[:, None] for table in (values[0], following, rewards[0], done, done))
        )
        worst = max(worst, float((ours[0] - theirs[:, 0]).abs().max()))
    print(f"{given.cases} cases, largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
