import json
import re
import subprocess
import sys

import requests

from tests.evaluation.report.runs_fakes import evaluated
from tests.first_steps import refused, succeeds
from tests.retrieval.serving import ROOT
from tests.test_package import HEAVY
from tests.viewer.conftest import build


def test_a_directory_without_a_run_is_refused(tmp_path):
    assert "is not a run directory" in refused("view", tmp_path)
    assert "is not a run directory" in refused("view", tmp_path, "--report")
    assert "2 runs are named; name one" in refused("view", tmp_path, tmp_path / "b", "--report")


def test_a_static_site_is_written_with_facts_and_only_once(tmp_path):
    run, site = build(tmp_path), tmp_path / "site"
    assert "16 pages" in succeeds("view", run.path, "--static", site, "--limit", 1)
    assert "Title 1" in (site / "q" / "q1" / "index.html").read_text(encoding="utf-8")
    assert "--static" in refused("view", run.path, "--static", site)


def test_addresses_are_answered_without_heavy_modules_until_the_server_is_stopped(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "leret", "view", str(build(tmp_path).path)]
    streams = {"stdout": subprocess.PIPE, "stderr": (tmp_path / "imports").open("w")}
    with streams["stderr"], subprocess.Popen(command, **streams, text=True, cwd=ROOT) as process:
        urls = [process.stdout.readline().split("http://")[1].split()[0] for _ in range(3)]
        assert [requests.get(f"http://{url}", timeout=60).status_code for url in urls] == [200] * 3
        process.terminate()
        assert process.wait(60) == 0
    imported = set(re.findall(r"\| +(\w+)$", (tmp_path / "imports").read_text(), re.MULTILINE))
    assert "aiohttp" in imported
    assert not imported & {*HEAVY, "filelock", "matplotlib", "pyarrow", "rich"}


def test_runs_are_compared_and_listed_in_every_form(tmp_path):
    run = evaluated(tmp_path / "r_1", {"base": [0.0, 1.0, 0.5], "ipo": [1.0, 1.0, 0.5]}).path
    assert "ipo - base" in succeeds("compare", run)
    assert "| ipo - base | 0.333" in succeeds("compare", run, "--form", "markdown")
    assert r"\end{tabular}" in succeeds("compare", run, "--form", "latex")
    [row] = json.loads(succeeds("compare", run, "--json"))["comparisons"]
    assert (row["n"], row["difference"]) == (3, 0.333333)
    assert "k is" not in refused("compare", run, "--measure", "f1")

    assert "r_1" in succeeds("compare", tmp_path)
    assert r"r\_1 & " in succeeds("compare", tmp_path, "--form", "latex")
    [row] = json.loads(succeeds("compare", tmp_path, "--json"))["runs"]
    assert row["figures"] == {"measure": "recall", "systems": {"ipo": 0.833333, "base": 0.5}}
    assert "is neither a run nor a directory with runs" in refused("compare", tmp_path / "none")
    for flag in ("--measure", "--evaluation"):
        assert "is not a run; name runs" in " ".join(refused("compare", tmp_path, flag, "f1").split())
