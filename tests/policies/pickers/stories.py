"""Choices among sentences, and a user's feature function."""

import numpy as np
import torch

from leret.core.types import STOP, Candidate, Choice
from leret.policies.base import Request

STORY = (
    "Mary went to the kitchen.",
    "John took the ball there.",
    "Mary took the milk.",
    "John went to the garden.",
    "Mary went to the hallway.",
    "Mary dropped the milk.",
)


def numbers(choice):
    rows = [[len(one.text), one.position or 0, len(choice.picked)] for one in choice.candidates]
    return ("length", "place", "step"), np.array(rows, np.float32)


def story(picked=(), stop=False, question="Where is the milk?"):
    whole = [Candidate(str(i), text, "", float(i)) for i, text in enumerate(STORY)]
    left = [one for i, one in enumerate(whole) if i not in picked]
    return Choice("pick", {"question": question}, [*left, *[STOP] * stop], tuple(whole[i] for i in picked))


def request(choice, *seeds, temperature=1.0, top_p=1.0):
    return Request((), seeds or (0,), temperature, 8, top_p, choice=choice)


def shaken(picker, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for weights in picker.model.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    picker.renew(f"shaken {seed}")
    return picker
