"""Sessions that are killed lose nothing and ask nothing twice; `benchmarks/kills.py` is the long version of this."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("faults", "samples"), [(0.0, 1), (0.3, 1)], ids=["sound replies", "30 % faulty replies"])
def test_a_run_killed_three_times_equals_one_that_was_not(faults, samples):
    command = [sys.executable, "benchmarks/kills.py", "--kills", "3", "--questions", "40"]
    command += ["--faults", str(faults), "--samples", str(samples), "--timeout-s", "3", "--stall-s", "30"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode in {0, 1}, ended.stderr
    told = json.loads(ended.stdout)
    assert told["equal"], told
    assert told["asked_twice"] == 0, told
    assert len(told["at"]) == 3
    assert 40 * 4 < told["requests"] <= 40 * 2 * 4
    assert bool(told["faults"]) == bool(faults)
