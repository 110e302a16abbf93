import re
from urllib.parse import unquote

import pytest

from leret.core.errors import ConfigError
from leret.viewer import collect, static
from leret.viewer.index import RunIndex
from tests.viewer.conftest import add_questions

USE = RunIndex.use


@pytest.fixture(autouse=True)
def _without_facts(monkeypatch):
    monkeypatch.setattr(collect, "collect", lambda *_, **__: None)
    monkeypatch.setattr(RunIndex, "use", lambda self, file: None)


def test_pages_are_written_and_every_link_leads_to_a_file(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(RunIndex, "use", lambda self, file: USE(self, shared[1]))
    runs = {name: RunIndex(shared[0], tmp_path / f"{name}.db") for name in ("a", "b")}
    n = static.write_site(runs, tmp_path / "site", 10, tmp_path)
    pages = [file for file in (tmp_path / "site").rglob("*") if file.suffix in {".html", ".csv"}]
    assert len(pages) == n == 2 * (1 + 1 + 6 + 4 + 3 + 3)
    for page in pages:
        for link in re.findall(r'(?:href|src|action)="([^"#?]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / unquote(link)).is_file(), (page, link)
    with pytest.raises(ConfigError, match="already exists"):
        static.write_site(runs, tmp_path / "site", 10, tmp_path)


def test_only_the_first_questions_have_pages_and_links(shared, tmp_path):
    static.write_site({"a": RunIndex(shared[0], tmp_path / "a.db")}, tmp_path / "site", 1, tmp_path)
    assert [path.name for path in (tmp_path / "site" / "q").iterdir()] == ["q1"]
    for name in ("questions", "groups"):
        html = (tmp_path / "site" / name / "index.html").read_text(encoding="utf-8")
        assert set(re.findall(r"q/(q\d)/", html)) == {"q1"}
        assert '<th scope="row" class="text">find' in html


def test_an_id_cannot_replace_another_page(run, tmp_path):
    names, site = {"z0": "..", "z1": "index.html", "z2": "assets"}, tmp_path / "site"
    add_questions(run, names)
    static.write_site({"a": RunIndex(run, tmp_path / "a.db")}, site, 10, tmp_path)
    for page in ("", "questions", "q/q1"):
        assert "query of z" not in (site / page / "index.html").read_text(encoding="utf-8")
    for state_id, name in names.items():
        assert (site / static._file(("q", name))).resolve().parent.parent == site / "q"
        link = unquote(static._url(1, "q", name))
        assert f"query of {state_id}" in (site / "questions" / link).read_text(encoding="utf-8")
