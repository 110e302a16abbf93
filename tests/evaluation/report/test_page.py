import re
from html.parser import HTMLParser

import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.types import Document, Hop, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, all_measures
from leret.evaluation.report.content import TrainingData, examples
from leret.evaluation.report.page import render
from leret.evaluation.results import SystemResults
from leret.evaluation.summary import summarise
from leret.evaluation.systems import System
from leret.programs.prompts import ZERO_SHOT

EVIL = '<script>alert("x")</script><img src=x onerror=y>'
CORPUS = {f"d{i}": Document(f"d{i}", f"{EVIL} {i}", "text") for i in range(9)}
FIELDS = {"answer": EVIL, "type": EVIL}
QUESTIONS = [Task.question(f"q{i}", f"{EVIL}?", gold=(f"d{i}", f"d{i + 1}"), **FIELDS) for i in range(8)]
MARGINS = {"rewards/accuracies": 0.5, "rewards/chosen": 0.1, "rewards/rejected": 0}
LOG = [{"step": i, "loss": 1 / i, **MARGINS} for i in (1, 2, 3)]


def system(name, kind, found, rivals=()):
    scorer = Scorer(all_measures({}), QUESTIONS, CORPUS)
    rows = []
    for i, question in enumerate(QUESTIONS):
        ranking = tuple(Passage(f"d{number}", "", "", 1.0) for number in found(i))
        hops = [Hop((q,), r) for q, r in ((EVIL, ()), (f"{EVIL} {name}", ranking))]
        rows += scorer.rows(Rollout(question.id, tuple(hops), True))
    return System(name, kind, name, prompt=ZERO_SHOT, rivals=rivals), SystemResults("key", rows, 1.0)


def page(systems, focus, learned=None, training=None):
    summary = summarise(systems, QUESTIONS, list(all_measures({})), EvalRecipe(resamples=200)) | {"focus": focus}
    rows = {system.name: results.rows for system, results in systems}
    shown = examples((focus, rows[focus]), ("base", rows["base"]), QUESTIONS, CORPUS, 10) if focus else None
    given = [("fact", EVIL)], learned or TrainingData(), training or {}, shown
    return render(summary, *given, name=EVIL, subtitle=EVIL)


@pytest.fixture(scope="module")
def full():
    systems = [
        system("raw-question", "baseline", lambda i: [7]),
        system("base", "base", lambda i: [i] if i else [0, 1]),
        system(EVIL, "policy", lambda i: [i, i + 1] if i else [], ("raw-question",)),
    ]
    learned = TrainingData({0: [0.0, 0.5, 1.0], 1: [1.0]}, {0: [0.5]}, 2, 1, {"parse": 3})
    training = {EVIL: {"log_history": LOG}, "of one step": {"log_history": LOG[:1]}}
    return page(systems, EVIL, learned, training)


class Checker(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), []
        self.feed(page)

    def values(self, *names):
        return [value for name, value in self.attributes if name in names]

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_it_is_well_formed_needs_nothing_beside_it_and_nothing_that_it_shows_becomes_markup(full):
    checked = Checker(full)
    assert checked.open == []
    assert len(checked.values("id")) == len(set(checked.values("id")))
    assert not checked.tags & {"script", "img", "iframe", "object", "link"}
    assert not [name for name, _ in checked.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in full
    addresses = checked.values("href", "src", "xlink:href") + re.findall(r"url\(([^)]*)\)", full)
    assert all(target.startswith("#") for target in addresses)
    assert "@import" not in full


def test_it_shows_pictures_figures_and_questions(full):
    assert full.count("<svg") == 6
    assert len(Checker(full).values("aria-label")) >= 5
    assert all(text in full for text in ("Histogram of reward. step 0: mean 0.500", "loss ends at 0.333"))
    # base finds both once and one seven times: (1 + 7 * .5) / 8; the policy nothing once and both seven times
    assert all(figure in full for figure in ("0.562", "0.875", "+0.312"))
    improved, worsened = full.split("Largest gains")[1].split("Largest losses")
    assert [part.count('<details class="example"') for part in (improved, worsened)] == [7, 1]
    assert "✓" in improved


def test_a_run_without_training_has_a_report_and_the_same_one_each_time():
    systems = [system("base", "base", lambda i: [0])]
    text = page(systems, None)
    assert text == page(systems, None)
    assert ("Results on held-out questions" in text, "Largest gains" in text) == (True, False)
    assert "Setup" in page([], None)


RAW = system("raw-question", "baseline", lambda i: [i, i + 1])
NOTHING = system("base", "base", lambda i: [])
SFT = system("sft", "policy", lambda i: [])
BETTER = system("sft", "policy", lambda i: [i + 1, i])
BEHIND = [system(name, "policy", lambda i: [i, i + 1][: 1 + (i < 2)], ("raw-question",)) for name in ("sft", "ipo")]
BANK = system("bank:1", "prompt", lambda i: [i])
ORACLE = system("oracle-titles", "baseline", lambda i: [i, i + 1])
RM3 = system("rm3", "baseline", lambda i: [i, i + 1])
HALF = system("raw-question", "baseline", lambda i: [i])


@pytest.mark.parametrize(
    ("systems", "focus", "says"),
    [
        ([RAW, NOTHING, SFT], "sft", "raw-question finds more than every system with an LM: 100% of the gold"),
        ([RAW, NOTHING, BANK], None, "raw-question finds at least as much as any .* LM: .*against 50% by bank:1"),
        ([RAW, NOTHING, *BEHIND], "sft", "raw-question finds at least as much as any system"),  # more comparisons
        ([RM3, NOTHING, SFT], "sft", "rm3 finds more than every system with an LM"),
        ([RAW, NOTHING, BETTER], "sft", "sft finds more than base: 100% .*, against 0%; the raw question finds 100%"),
        ([HALF, NOTHING, BANK, BETTER], "sft", "sft finds more than base: 100% .*; the raw question finds 50%"),
        ([NOTHING, SFT], "sft", None),
        ([ORACLE, BANK, NOTHING], None, "bank:1 finds more than base"),
    ],
)
def test_the_title_names_the_system_that_found_most(systems, focus, says):
    heading = re.search("<h1>(.*)</h1>", page(systems, focus))[1]
    assert says is None or re.search(says, heading), heading


def test_a_policy_behind_the_raw_question_is_not_shown_as_a_gain():
    for systems, compared in (([RAW, NOTHING, *BEHIND], (True, False)), ([HALF, NOTHING, BETTER], (False, True))):
        shown = page(systems, "sft")
        assert ("raw-question to sft" in shown, "base to sft" in shown) == compared


def test_only_a_sure_difference_has_a_colour():
    for found, coloured in ((lambda i: [i, i + 1][: 1 + (i == 0)], False), (lambda i: [i, i + 1], True)):
        systems = [system("base", "base", lambda i: [i]), system("sft", "policy", found)]
        assert bool(re.findall('<b class="(up|down)">', page(systems, "sft"))) is coloured
