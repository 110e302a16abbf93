"""A picker on your own data learns which name to add to a question to find the missing page. It needs no LM.

    leret run expand-pick --run runs/mine \\
        --set data.kind=jsonl --set data.questions=questions.jsonl --set data.corpus=corpus.jsonl \\
        --set policy.features=examples/picker.py:numbers
    python examples/picker.py runs/mine "Where was the director of Ed Wood born?"

`numbers` is your own feature function: the picker's view of a candidate. Here it extends the shipped numbers.
"""

import sys

import numpy as np

import leret
from leret.policies.pickers.features import mentions


def numbers(choice):
    """The shipped numbers of each candidate, and whether it is written in capitals (NASA, UK)."""
    names, values = mentions(choice)
    capitals = [[one.text.isupper()] for one in choice.candidates]
    return (*names, "capitals"), np.hstack([values, np.array(capitals, np.float32)])


def main(run, question):
    with leret.load(f"{run}/program") as program:
        return program(question=question)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        found = main(*sys.argv[1:])
    except leret.LeretError as error:  # such as a run that was not evaluated yet
        sys.exit(f"error: {error}")
    print("\n".join(found.context))
