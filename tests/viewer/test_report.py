import re
from dataclasses import replace

import pytest

from leret.core.errors import RunError
from leret.sampling.store.store import Store
from leret.viewer import report
from leret.viewer.pages import ASSETS
from tests.first_steps import edit
from tests.viewer.conftest import ORIGIN, build, sample, state

SHOWN = re.compile('<details class="question"><summary><span class="text">(.*?)</span>')


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = build(tmp_path_factory.mktemp("report"))
    return report.write_report(run).read_text(encoding="utf-8")


def test_it_needs_nothing_beside_it_and_nothing_that_it_shows_becomes_markup(page):
    assert (ASSETS / "view.js").read_text(encoding="utf-8").strip() in page
    shown = re.sub("(?s)<script>.*?</script>", "", page, count=1)
    assert not re.search("<(script|img|iframe|object|link)", shown)
    assert not re.search(r'\son\w+=|(href|src|action)="(?!#)|@import|url\(', shown)
    ids = re.findall(' id="([^"]*)"', shown)
    assert len(ids) == len(set(ids))
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)


def test_it_is_the_overview_with_trainings_and_trees(page):
    assert (
        re.search("<h1>(.*)</h1>", page)[1] == "ipo finds about as much as base: 50% of the gold documents, against 50%"
    )
    order = ['class="dots"', "Table of systems", "Histogram of reward. step 1", "Training of ipo", "Trees of questions"]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert "loss: loss ends at 0.3333" in page
    assert re.findall(r'class="card row([\w ]*)" id="(\w+)"', page) == [("", "later"), (" chosen", "g")]
    assert "gold</small>" in page
    assert [text.split()[0] for text in SHOWN.findall(page)] == ["q3", "q1", "q2"]  # improved, failed, the rest
    assert "3 of 3 sampled and evaluated questions" in page


def test_trees_that_do_not_fit_are_left_out_and_counted(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_BYTES", 1_000_000)
    with Store(run.store) as store:
        for number in range(40):
            task, name = f"w{number}", f"z{number}"
            store.put_state(replace(state(name, task), inputs={"question": task}))
            large = sample(f"{number}", name, (), 1.0, "long " * (200 if number % 2 else 20_000))
            store.put_samples([replace(large, task_id=task)], ORIGIN)
    page = report.write_report(run).read_text(encoding="utf-8")
    assert report.MAX_BYTES * 0.9 < len(page.encode()) <= report.MAX_BYTES
    trees = SHOWN.findall(page)
    assert "w39" in trees  # a small one after large ones
    left = 43 - len(trees)
    assert f"{left} questions ({left} of them because" in page


def test_a_named_evaluation_has_a_report_of_its_own_also_without_samples(run):
    run.store.unlink()
    named = run.eval / "read"
    named.mkdir()
    for name in ("base", "ipo", "summary.json"):
        (run.eval / name).rename(named / name)
    edit(named / "summary.json", '{"measures"', '{"name": "read", "measures"')
    assert report.write_report(run, "read") == named / "report.html"
    page = (named / "report.html").read_text(encoding="utf-8")
    assert "Systems: read" in page
    assert "ipo finds about as much as base" in page
    assert not run.store.exists()
    with pytest.raises(RunError, match="choose --evaluation read"):
        report.write_report(run)
    (named / "summary.json").unlink()
    with pytest.raises(RunError, match="run `leret eval RECIPE"):
        report.write_report(run)
