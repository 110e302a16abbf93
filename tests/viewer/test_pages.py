import csv
import io
import re
from urllib.parse import unquote

import pytest

from leret.viewer.pages import MENU, Pages, part_of, server_url, visible
from tests.viewer.conftest import EVIL, LINK, SHOWN

PAGES = [(), *((name,) for name in MENU), ("q", "q1"), ("q", "q3")]


@pytest.fixture
def pages(index):
    return Pages({"run": index}, {})


def text(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.mark.parametrize("parts", [*PAGES, ("q", "q1", "s0")], ids="/".join)
def test_no_text_of_a_run_becomes_markup(pages, parts):
    html = pages.page(parts, {})
    assert html.count("<script") == 1  # view.js
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", html)
    assert not re.search(r'(href|src|action)="(?!/|#)', html)
    assert not re.search(r"\son\w+=", html)


def test_a_tree_shows_queries_rewards_gold_documents_and_pairs(pages):
    html = pages.page(("q", "q1"), {"policy": "P1"})
    assert f'<p class="query">{SHOWN}</p>' in html
    assert LINK.replace("'", "&#39;") in html
    assert re.findall(r'class="card row([\w ]*)" id="(\w+)" data-n="(\d)" data-beats="([\d ]*)"', html) == [
        ("", "a", "1", "2"), (" chosen", "b", "2", ""), (" failed", "cc", "3", ""),
        (" chosen", "e", "1", "2"), ("", "ff", "2", ""),
    ]  # fmt: skip
    chips = re.findall(r'<li class="(\w+)"><span.*?</span> (.*?) <small>(.*?)</small>', html)
    assert [" ".join(chip) for chip in chips] == [
        "new Title 1 new at 1", "new Title 2 new at 2", "new Title 1 new at 2", "missing Title 2 not found",
        "missing Title 1 not found", "missing Title 2 not found", "found Title 1 2 → 1", "new Title 2 new at 3",
        "lost Title 1 lost, was 2", "missing Title 2 not found",
    ]  # fmt: skip
    assert 'href="/q/q1/s0"' in html


def test_missing_pages_questions_and_states_are_none(pages):
    missing = ("x",), ("q",), ("q", "x"), ("q", "q1", "x"), ("groups", "x")
    assert [pages.page(parts, {}) for parts in missing] == [None] * 5


def test_the_overview_shows_leaks_costs_and_gold_documents_and_is_a_csv_file(pages):
    shown = text(pages.page((), {}))
    assert f"Leak check: none {text(SHOWN)}" in shown
    assert "LM calls tokens searches seconds failed unparsed" in shown
    assert "2.0 – 1.5 0.250" in shown
    assert "base 0.500 0.40 to 0.60" in shown
    assert "finds 50.0% of its gold documents on average, and all of them for 1 of 2 questions" in shown
    assert "Gold documents in the corpus: 75.0%" in shown
    rows = list(csv.DictReader(io.StringIO("".join(pages.page(("overview.csv",), {})))))
    assert (rows[0]["system"], rows[0]["measure"], rows[0]["low"], rows[1]["high"]) == ("base", "recall", "0.4", "")
    assert [value for name, value in rows[0].items() if name.endswith("per question")] == ["2.0", "", "1.5", "0.25"]


def test_every_id_has_one_address_that_a_browser_keeps():
    assert server_url("q", "a/b c?", "s", anchor="x", page="") == "/q/a%2Fb%20c%3F/s#x"
    assert server_url("questions", search="a&b", sort=None) == "/questions?search=a%26b"
    for part in (".", "..", "~..", "~~.", "~", "~a", "...", "%2E", "a/..", "a\nb", "~...", "index.html"):
        [_, address] = server_url("q", part).rsplit("/", 1)
        assert address not in {".", "..", "%2E", "%2E%2E"}
        assert part_of(unquote(address)) == part


def test_invisible_characters_are_shown_and_others_kept():
    for text in ("é\t漢\nعربي", "1\u202f000", "می\u200cخواهم", "\U0001f469\u200d\U0001f52c"):
        assert visible(text) == text
    assert visible(EVIL) == "<script>document.title = 'hacked'</script>[U+0007][U+202E]txet[U+202C]"
    assert visible("\ud800\u200b") == "[U+D800][U+200B]"


def test_tokens_have_the_samplers_log_probabilities_on_the_page_of_a_state(pages):
    html = pages.page(("q", "q1", "s1"), {})
    shown_tokens = re.findall(r'<span class="token" style="--p: ([.\d]+)".*?<small>(.*?)</small>', html)
    assert shown_tokens == [("0.78", "-0.25"), ("0.22", "-1.50"), ("1.00", "0.00")]
    assert "only the sampler&#39;s" in html or "only the sampler's" in html
    assert html.count("log-probability by token") == 1  # the other sample has none
    assert '<a href="/q/q1/s1#l-e">log-probability by token</a>' in pages.page(("q", "q1"), {"policy": "P1"})
    assert "log-probability by token" not in pages.page(("q", "q1", "s0"), {})
