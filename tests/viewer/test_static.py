import re
from urllib.parse import unquote

import pytest

from leret.core.errors import ConfigError
from leret.sampling.store.store import Store
from leret.viewer import collect, static
from leret.viewer.index import RunIndex
from tests.viewer.conftest import ORIGIN, sample, state


def test_pages_are_written_and_every_link_leads_to_a_file(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "collect", lambda *_, **__: None)
    monkeypatch.setattr(RunIndex, "use", lambda self, file, use=RunIndex.use: use(self, shared[1]))
    runs = {name: RunIndex(shared[0], tmp_path / f"{name}.db") for name in ("a", "b")}
    n = static.write_site(runs, tmp_path / "site", 10, tmp_path)
    pages = [file for file in (tmp_path / "site").rglob("*") if file.suffix in {".html", ".csv"}]
    assert len(pages) == n == 2 * (1 + 1 + 6 + 4 + 3 + 3)
    for page in pages:
        for link in re.findall(r'(?:href|src|action)="([^"#?]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / unquote(link)).is_file(), (page, link)
    with pytest.raises(ConfigError, match="already exists"):
        static.write_site(runs, tmp_path / "site", 10, tmp_path)


def test_only_the_first_questions_have_pages_and_links(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "collect", lambda *_, **__: None)
    monkeypatch.setattr(RunIndex, "use", lambda self, file: None)
    static.write_site({"a": RunIndex(shared[0], tmp_path / "a.db")}, tmp_path / "site", 1, tmp_path)
    assert [path.name for path in (tmp_path / "site" / "q").iterdir()] == ["q1"]
    for name in ("questions", "groups"):
        html = (tmp_path / "site" / name / "index.html").read_text(encoding="utf-8")
        assert set(re.findall(r"q/(q\d)/", html)) == {"q1"}
        assert '<th scope="row" class="text">find' in html


@pytest.mark.parametrize("name", ["..", "index.html", "assets"])
def test_an_id_cannot_replace_another_page(run, tmp_path, monkeypatch, name):
    with Store(run.store) as store:
        store.put_state(state("z0", name))
        store.put_samples([sample("z", "z0", question_id=name)], ORIGIN)
    monkeypatch.setattr(collect, "collect", lambda *_, **__: None)
    monkeypatch.setattr(RunIndex, "use", lambda self, file: None)
    static.write_site({"a": RunIndex(run, tmp_path / "a.db")}, tmp_path / "site", 10, tmp_path)
    assert (tmp_path / "site" / static._file(("q", name))).resolve().parent.parent == tmp_path / "site" / "q"
    for page in ("", "questions", "q/q1"):
        assert "query z" not in (tmp_path / "site" / page / "index.html").read_text(encoding="utf-8")
    link = static._url(1, "q", name)
    target = (tmp_path / "site" / "questions" / unquote(link)).read_text(encoding="utf-8")
    assert "query z" in target
