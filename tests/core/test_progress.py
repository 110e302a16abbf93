import re

import pytest

from leret.core.progress import ProgressLines


@pytest.mark.parametrize(("every_s", "n"), [(0.0, 4), (60.0, 1)])
def test_progress_in_a_pipe_is_plain_lines(every_s, n, capsys):
    lines = ProgressLines(every_s)
    lines.start("sampling", 4)
    for reward in (0.25, 0.5, 0.5, 0.5):
        lines.advance(1, mean_reward=reward, failures=0)
    lines.finish()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == n  # the last line of a part is written once, at its end
    assert n == 1 or re.fullmatch(r"sampling: 1/4, \S+/s, \d+:\d\d left, mean reward 0.25, failures 0", told[0])
    assert re.fullmatch(r"sampling: 4/4, \S+/s, \d+\.\d s, mean reward 0.5, failures 0", told[-1])
