import re
from dataclasses import replace

import pytest

from leret.core.errors import RunError
from leret.evaluation.report import page
from leret.sampling.store.store import Store
from leret.viewer import report
from tests.evaluation.report.test_page import Checker
from tests.viewer.conftest import ORIGIN, sample, state

SHOWN = re.compile('<details class="question"><summary><span class="text">(.*?)</span>')


@pytest.fixture(scope="module")
def section(shared):
    return report.trees(shared[0], "", 1_000_000)


def test_trees_are_those_of_the_viewer_without_links_scripts_or_markup(section):
    checked = Checker(section)
    assert len(checked.values("id")) == len(set(checked.values("id")))
    assert not checked.tags & {"script", "img", "iframe", "object", "link"}
    assert all(address.startswith("#") for address in checked.values("href", "src"))
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", section)
    assert re.findall(r'class="card row([\w ]*)" id="(\w+)"', section) == [("", "later"), (" chosen", "g")]
    assert "gold</small>" in section


def test_questions_are_chosen_by_difference_then_failures_then_spread(section):
    assert [text.split()[0] for text in SHOWN.findall(section)] == ["q3", "q1", "q2"]  # improved, failed, the rest
    assert "3 of 3 sampled and evaluated questions" in section


def test_trees_that_do_not_fit_are_left_out_and_counted(run):
    with Store(run.store) as store:
        for number in range(120):
            task, name = f"w{number}", f"z{number}"
            store.put_state(replace(state(name, task), inputs={"question": task}))
            large = sample(f"{number}", name, (), 1.0, "long " * (200 if number % 2 else 20_000))
            store.put_samples([replace(large, task_id=task)], ORIGIN)
    section = report.trees(run, "", page.MAX_BYTES)
    assert page.MAX_BYTES * 0.9 < len(section.encode()) <= page.MAX_BYTES
    shown = SHOWN.findall(section)
    assert "w119" in shown  # a small one after large ones
    left = 123 - len(shown)
    assert f"{left} questions ({left} of them because" in section


def test_a_run_without_samples_or_an_evaluation_has_no_trees_or_report(run):
    (run.eval / "summary.json").unlink()
    with pytest.raises(RunError, match="run `leret eval RECIPE"):
        report.write_report(run)
    assert "2 of 2" in report.trees(run, "", page.MAX_BYTES)
    run.store.unlink()
    assert report.trees(run, "", page.MAX_BYTES) == ""
