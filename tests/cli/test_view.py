import re
import subprocess
import sys

import requests

from tests.first_steps import refused, succeeds
from tests.retrieval.serving import ROOT
from tests.test_package import HEAVY
from tests.viewer.conftest import build


def test_a_directory_without_a_run_is_refused(tmp_path):
    assert "is not a run directory" in refused("view", tmp_path)
    assert "is not a run directory" in refused("report", tmp_path)


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
