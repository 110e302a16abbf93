"""The report is one file, says what the summary says, and lets nothing in."""

import re
from html.parser import HTMLParser

import pytest

from leret.core.types import Document, Hop, Passage, Rollout, Task
from leret.evaluation.measures import Scorer, all_measures
from leret.evaluation.report.content import TrainingData, examples
from leret.evaluation.report.page import render
from leret.evaluation.results import SystemResults
from leret.evaluation.statistics import Statistics
from leret.evaluation.summary import summarise
from leret.evaluation.systems import System
from leret.programs.prompts import ZERO_SHOT

EVIL = '<script>alert("x")</script><img src=x onerror=y>'
CORPUS = {f"d{i}": Document(f"d{i}", f"{EVIL} {i}", "text") for i in range(9)}
QUESTIONS = [
    Task.question(f"q{i}", f"{EVIL}?", gold=(f"d{i}", f"d{i + 1}"), type=(EVIL, "comparison")[i % 2], answer=EVIL)
    for i in range(8)
]
LOG = [
    {"step": i, "loss": 1 / i, "rewards/accuracies": 0.5, "rewards/chosen": 0.1 * i, "rewards/rejected": 0}
    for i in (1, 2, 3)
]


def system(name, kind, found, rivals=()):
    scorer = Scorer(all_measures(()), QUESTIONS, CORPUS)
    rows = []
    for i, question in enumerate(QUESTIONS):
        ranking = tuple(Passage(doc_id, "", "", 1.0) for doc_id in found(i))
        hops = [Hop("p", {}, (), EVIL, {"query": q}, r) for q, r in ((EVIL, ()), (f"{EVIL} {name}", ranking))]
        rows += scorer.rows(Rollout(question.id, tuple(hops), True))
    return System(name, kind, name, prompt=ZERO_SHOT, rivals=rivals), SystemResults("key", rows, 1.0)


def page(systems, focus, **more):
    summary = summarise(systems, QUESTIONS, all_measures(()), "base", Statistics(200))
    summary |= {"focus": focus}
    shown = None
    if focus:
        rows = {system.name: results.rows for system, results in systems}
        shown = examples((focus, rows[focus]), ("base", rows["base"]), QUESTIONS, CORPUS, 10)
    return render(
        summary,
        [("fact", EVIL)],
        more.get("learned", TrainingData()),
        more.get("training", {}),
        shown,
        name=EVIL,
        subtitle=EVIL,
    )


@pytest.fixture(scope="module")
def full():
    systems = [
        system("raw-question", "baseline", lambda i: ["d7"]),
        system("base", "base", lambda i: [f"d{i}"] if i else ["d0", "d1"]),
        system(EVIL, "policy", lambda i: [f"d{i}", f"d{i + 1}"] if i else [], ("raw-question",)),
    ]
    learned = TrainingData({1: [0.0, 0.5, 1.0], 2: [1.0]}, {1: [0.5]}, 2, 1, {"parse": 3})
    return page(systems, EVIL, learned=learned, training={EVIL: {"log_history": LOG}})


class Checker(HTMLParser):
    VOID = frozenset({"meta", "br"})

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.tags, self.attributes = [], [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_it_is_well_formed_and_nothing_that_it_shows_becomes_markup(full):
    checked = Checker(full)
    assert checked.open == []
    assert len(checked.ids) == len(set(checked.ids))
    assert not checked.tags & {"script", "img", "iframe", "object", "link"}
    assert not [name for name, _ in checked.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in full


def test_it_needs_nothing_beside_it(full):
    addresses = [value for name, value in Checker(full).attributes if name in {"href", "src", "xlink:href"}]
    assert all(target.startswith("#") for target in (*addresses, *re.findall(r"url\(([^)]*)\)", full)))
    assert "@import" not in full


def test_it_shows_pictures_figures_and_questions(full):
    assert full.count("<svg") == 5
    assert [name for name, _ in Checker(full).attributes].count("aria-label") >= 5
    assert "Histogram of reward. hop 1: mean 0.500" in full
    # base finds both once and one seven times: (1 + 7 * .5) / 8; the policy nothing once and both seven times
    assert all(figure in full for figure in ("0.562", "0.875", "+0.312"))
    improved, worsened = full.split("Most improved")[1].split("Most worsened")
    assert [part.count('<details class="example"') for part in (improved, worsened)] == [7, 1]
    assert "✓" in improved


def test_a_run_without_training_has_a_report():
    systems = [system("base", "base", lambda i: ["d0"])]
    text = page(systems, None)
    assert text == page(systems, None)  # byte for byte
    assert "How it was made" in page([], None)
    assert "Results on held-out questions" in text
    assert "Most improved" not in text


def heading(text):
    return re.search("<h1>(.*)</h1>", text)[1]


def test_the_title_says_that_the_raw_question_beats_every_system():
    raw = system("raw-question", "baseline", lambda i: [f"d{i}", f"d{i + 1}"])
    base, sft = (system(name, kind, lambda i: []) for name, kind in (("base", "base"), ("sft", "policy")))
    better = system("sft", "policy", lambda i: [f"d{i + 1}", f"d{i}"])
    assert "without an LM, finds more than every system with an LM: 100% of the gold" in heading(
        page([raw, base, sft], "sft")
    )
    assert heading(page([raw, base, better], "sft")).startswith("sft finds more than base")
    assert "without an LM" not in heading(page([raw, base, better], "sft"))


def test_the_title_tells_no_difference_that_is_not_compared_or_not_sure_when_adjusted():
    raw = system("raw-question", "baseline", lambda i: [f"d{i}", f"d{i + 1}"])
    base = system("base", "base", lambda i: [])
    prompt = system("bank:1", "prompt", lambda i: [f"d{i}"])
    assert "without an LM" not in heading(page([raw, base, prompt], None))
    policies = [
        system(name, "policy", lambda i: [f"d{i}", f"d{i + 1}"][: 2 if i < 2 else 1], ("raw-question",))
        for name in ("sft", "ipo")
    ]
    assert "without an LM" in heading(page([raw, base, policies[0]], "sft"))
    assert "without an LM" not in heading(page([raw, base, *policies], "sft"))


def test_only_a_sure_difference_has_a_colour():
    base = system("base", "base", lambda i: [f"d{i}"])
    unsure = system("sft", "policy", lambda i: [f"d{i}", f"d{i + 1}"] if i == 0 else [f"d{i}"])
    sure = system("sft", "policy", lambda i: [f"d{i}", f"d{i + 1}"])
    for policy, coloured in ((unsure, False), (sure, True)):
        found = re.findall('<b class="(up|down)">', page([base, policy], "sft"))
        assert bool(found) is coloured
