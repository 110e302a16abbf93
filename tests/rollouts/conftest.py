from tests.sampling.conftest import formatter, in_data, made, program, replay, run, sampled
from tests.training.conftest import base
from tests.training.rounds.conftest import run as begun

__all__ = ["base", "begun", "formatter", "in_data", "made", "program", "replay", "run", "sampled"]
