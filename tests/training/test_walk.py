import cProfile
import pstats
from pathlib import Path

import leret
from leret.rollouts.environment import Environment
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe

PACKAGE = str(Path(leret.__file__).parent)
NOT_COUNTED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
NOT_COUNTED |= {"parse_alone"}  # leret's lock around Python's parser, which libraries call


def test_a_training_by_ipo_passes_few_files_and_calls(original, monkeypatch):
    opened, open_ = [], Environment.open
    monkeypatch.setattr(Environment, "open", lambda run: opened.append(run) or open_(run))
    profile = cProfile.Profile()
    profile.runcall(train, IPORecipe(), original)
    entries = pstats.Stats(profile).stats.items()
    calls = {key: one[1] for key, one in entries if key[0].startswith(PACKAGE) and key[2] not in NOT_COUNTED}
    assert len({file for file, *_ in calls}) <= 20
    assert sum(calls.values()) <= 1500
    assert not opened, "stored rows need no program"
