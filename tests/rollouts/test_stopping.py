"""Two states, stop or go: credits that learn to go on, in exact expectation and with leret's functions.

The first search found one of two gold documents. At state 0 the policy stops, or goes on to a document that is not gold
but leads to state 1, where it stops, or goes on to the other gold document. Each document costs .05.
"""

import math

import pytest
import torch

from leret.core.types import Outcome, Passage, Task
from leret.rewards import REWARDS, scoring
from leret.rollouts.credit import Crediting
from leret.training.rounds.advantages import group_relative

TASK = Task.question("q", "?", gold=("a", "b"))


def outcome(docs):
    return Outcome(TASK, ranking=tuple(Passage(doc, "", "", 1.0) for doc in docs))


REWARD = scoring(lambda outcome: REWARDS["recall"](outcome) - 0.05 * len(outcome.ranking), "net")
CREDITING = Crediting(REWARD, REWARD)


def advantages(credit, going):
    """Return the advantages of stop and go at each state; ``going`` is the probability of go at state 1."""
    value = going * REWARD(outcome("axb")) + (1 - going) * REWARD(outcome("ax"))
    states = [
        [("a", REWARD(outcome("a"))), ("ax", value)],
        [(docs, REWARD(outcome(docs))) for docs in ("ax", "axb")],
    ]
    for actions in states:
        parts = [{"net": REWARD(outcome(docs)), "final": end} for docs, end in actions]
        rewards = torch.tensor([reward for reward, _ in CREDITING.mixed(parts, credit, "q")]).double()
        yield group_relative(rewards, torch.zeros(2).long(), "none").tolist()


def trained(credit):
    """Return the probability of go at each state after gradient ascent on the expected advantage."""
    logits = [0.0, 0.0]
    for _ in range(150):
        go = [1 / (1 + math.exp(-logit)) for logit in logits]
        for state, (stop, on) in enumerate(advantages(credit, go[1])):
            visits = 1.0 if state == 0 else go[0]
            logits[state] += 40.0 * visits * go[state] * (1 - go[state]) * (on - stop)
    return [1 / (1 + math.exp(-logit)) for logit in logits]


@pytest.mark.parametrize(("credit", "goes"), [("step", False), ("both", True), ("final", True)])
def test_only_credit_that_sees_further_searches_learns_not_to_stop(credit, goes):
    probability = trained(credit)[0]
    assert probability > 0.9 if goes else probability < 0.1


def test_normalising_by_turn_charges_for_every_further_turn_and_groups_of_a_state_do_not():
    stop = [REWARD(outcome("a"))]
    go = [REWARD(outcome("ax")), REWARD(outcome("axb")) - REWARD(outcome("ax"))]  # gain of each turn
    rewards, turns = torch.tensor([*stop, *go]).double(), torch.tensor([0, 0, 1])
    by_turn = group_relative(rewards, turns, "none").tolist()
    assert sum(by_turn[1:]) < by_turn[0], "as in MT-GRPO: the mean of turn 1 takes away all that going on gained"
    at_stop, at_go = next(iter(advantages("final", 1.0)))
    assert at_go - at_stop == pytest.approx(sum(go) - sum(stop))
