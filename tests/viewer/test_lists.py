import csv
import io

import pytest

from leret.core.errors import ConfigError
from leret.viewer.lists import LISTS, csv_lines, select

DEFAULTS = {"a": "ipo", "b": "base"}


def rows(index, kind, **query):
    selection = select(kind, query, ["base", "ipo"], DEFAULTS)
    return selection.rows(index, selection.ids(index)[selection.page * 50 :])


def ids(index, kind, **query):
    return [row["question_id"] for row in rows(index, kind, **query)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["q1", "q2", "q3"]),
        ({"search": "Q2 <SCRIPT"}, ["q2"]),
        ({"steps": "2"}, ["q1"]),
        ({"min": "0.5", "max": "1"}, ["q1"]),
        ({"spread": "no"}, ["q2"]),
        ({"failures": "yes"}, ["q1"]),
        ({"change": "improved"}, ["q3"]),
        ({"sort": "best", "desc": "1"}, ["q1", "q2", "q3"]),
        ({"page": "2"}, []),
    ],
)
def test_questions_are_filtered_sorted_and_paged(index, query, expected):
    assert ids(index, "questions", **query) == expected
    assert len(select("questions", query, ["base", "ipo"], DEFAULTS).ids(index)) in {len(expected), 3}


def test_an_invalid_filter_is_an_error_that_names_it():
    for name, value in (("min", "x"), ("sort", "q.text; --"), ("spread", "maybe"), ("page", "0")):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            select("questions", {name: value}, [], {})


def test_rows_have_reasons_texts_and_missing_documents(index):
    reasons = {row["state_id"]: row["reason"] for row in rows(index, "groups")}
    assert reasons == {"s0": "equal completions", "t0": "equal completions"}
    assert ids(index, "groups", reason="no rewards") == []
    [row] = rows(index, "coverage")
    assert (row["question_id"], row["missing"]) == ("q2", "Title 2; gone (not in the corpus)")
    chosen = {(row["chosen"], row["rejected"], row["margin"]) for row in rows(index, "pairs", step="2")}
    assert chosen == {("query e", "query ff", 1.0)}


@pytest.mark.parametrize("kind", LISTS)
def test_every_list_is_a_csv_file(index, kind):
    selection = select(kind, {}, ["base", "ipo"], DEFAULTS)
    lines = "".join(selection.csv(index)).splitlines()
    assert lines[0].startswith("question_id,")
    assert len(lines) == len(selection.ids(index)) + 1


def read(text):
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


STARTS = ["=", "+", "-", "@", "\t", "\r", "\n", "\n=", " =", "\xa0@", "\ufeff=", "\u200b+"]
WIDE = ["\uff1d", "\uff0b", "\uff0d", "\uff20", "\ufe66", "\u2212"]


def test_only_a_cell_that_may_be_a_formula_begins_with_an_apostrophe():
    formulas = [f"{start}1+1" for start in (*STARTS, *WIDE, "=1\r=", "=1\n=")]
    assert read(csv_lines([[*formulas, "x"]])) == [[*(f"'{formula}" for formula in formulas), "x"]]
    cells = ["a\r=1", "a\n=1", "a=1", "(-1)", "é", "", " ", "'=1", "1-2", "“quote”", "\ufeffx"]
    assert read(csv_lines([[*cells, -1, 2.5, None]])) == [[*cells, "-1", "2.5", ""]]
