"""Numbers of a candidate that tell which one to pick."""

import numpy as np


def numbers(choice):
    """Whether a candidate names the question's word, whether it names what was picked last, and two of no use."""
    asked, last = choice.context["question"], choice.picked[-1].text if choice.picked else ""
    rows = [
        [one.text.split()[0] in asked, one.text.split()[0] in last, len(one.text) % 3, i % 2]
        for i, one in enumerate(choice.candidates)
    ]
    return ("asked", "follows", "length", "odd"), np.array(rows, np.float32)
