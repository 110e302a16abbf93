import sys
from contextlib import contextmanager
from pathlib import Path

import leret
from leret.rollouts.environment import Environment
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.algorithms.preference import IPORecipe
from leret.training.online.writing import WriterLearner
from leret.training.stage import train

PACKAGE = str(Path(leret.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


@contextmanager
def calls():
    walk = []

    def see(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            walk.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))

    sys.setprofile(see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def test_a_training_by_ipo_passes_few_files_and_calls(original, monkeypatch):
    opened, open_ = [], Environment.open
    monkeypatch.setattr(Environment, "open", lambda run: opened.append(run) or open_(run))
    with calls() as walk:
        train(IPORecipe(), original)
    assert len({file for file, _ in walk}) <= 34
    assert len(walk) <= 1500
    assert not opened, "stored rows need no program"


def test_an_update_by_grpo_passes_six_files(original, monkeypatch):
    learn, files = WriterLearner.learn, []

    def counted(self, sampled, number):
        with calls() as walk:
            entry = learn(self, sampled, number)
        files.append({file for file, _ in walk})
        return entry

    monkeypatch.setattr(WriterLearner, "learn", counted)
    train(GRPORecipe(max_steps=2, questions_per_round=4, max_completion_length=12, learning_rate=1e-3), original)
    assert max(map(len, files)) <= 6, files
