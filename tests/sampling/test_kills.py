"""Sessions that are killed lose nothing and ask nothing twice; `benchmarks/kills.py` is the long version of this."""

import json
import os
import subprocess
import sys

import pytest

from tests.sampling.fakes import ROOT


@pytest.mark.parametrize("faults", [0.0, 0.3], ids=["sound replies", "30 % faulty replies"])
def test_a_run_killed_three_times_equals_one_that_was_not(faults):
    command = [sys.executable, "benchmarks/kills.py", "--kills", "3", "--questions", "40"]
    command += ["--faults", str(faults), "--samples", "1", "--timeout-s", "3", "--stall-s", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode in {0, 1}, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["equal"], told["asked_twice"], len(told["at"]), bool(told["faults"])) == (True, 0, 3, bool(faults))
    assert 40 * 4 < told["requests"] <= 40 * 2 * 4
