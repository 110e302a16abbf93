from tests.first_steps import refused, succeeds
from tests.viewer.conftest import build


def test_a_directory_without_a_run_is_refused(tmp_path):
    assert "is not a run directory" in refused("view", tmp_path)


def test_a_static_site_is_written_with_facts_and_only_once(tmp_path):
    run, site = build(tmp_path), tmp_path / "site"
    assert "16 pages" in succeeds("view", run.path, "--static", site, "--limit", 1)
    assert "Title 1" in (site / "q" / "q1" / "index.html").read_text(encoding="utf-8")
    assert "--static" in refused("view", run.path, "--static", site)
