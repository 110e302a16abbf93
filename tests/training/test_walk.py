import cProfile
import pstats
from pathlib import Path

import leret
from leret.rollouts.environment import Environment
from leret.training.rounds.grpo import GRPORecipe
from leret.training.rounds.writing import WriterLearner
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe

PACKAGE = str(Path(leret.__file__).parent)
NOT_COUNTED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
NOT_COUNTED |= {"parse_alone"}  # leret's lock around Python's parser, which libraries call


def walk(call, *arguments):
    """Call a function; return its result, and how often it called each file and function of leret."""
    profile = cProfile.Profile()
    result = profile.runcall(call, *arguments)
    entries = pstats.Stats(profile).stats.items()
    return result, {key: one[1] for key, one in entries if key[0].startswith(PACKAGE) and key[2] not in NOT_COUNTED}


def test_a_training_by_ipo_passes_few_files_and_calls(original, monkeypatch):
    opened, open_ = [], Environment.open
    monkeypatch.setattr(Environment, "open", lambda run: opened.append(run) or open_(run))
    _, calls = walk(train, IPORecipe(), original)
    assert len({file for file, *_ in calls}) <= 20
    assert sum(calls.values()) <= 1500
    assert not opened, "stored rows need no program"


def test_an_update_by_grpo_passes_six_files(original, monkeypatch):
    learn, files = WriterLearner.learn, []

    def counted(self, sampled, number):
        entry, calls = walk(learn, self, sampled, number)
        files.append({file for file, *_ in calls})
        return entry

    monkeypatch.setattr(WriterLearner, "learn", counted)
    train(GRPORecipe(max_steps=2, questions_per_round=4, max_completion_length=12, learning_rate=1e-3), original)
    assert max(map(len, files)) <= 6, files
