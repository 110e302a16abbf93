import json
import re
from dataclasses import replace

import numpy as np
import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.types import Task
from leret.evaluation.results import ScoredHop, SystemResults
from leret.evaluation.summary import headline, score_table, summarise, table
from leret.evaluation.systems import System
from leret.programs.prompts import ZERO_SHOT

QUESTIONS = [Task.question(f"q{i}", "?", type="bridge" if i < 3 else "comparison") for i in range(5)]
NAN = [np.nan] * 2


def row(question, hop, recall, sample=0, **more):
    measures = {} if recall is None else {"recall": recall}
    return ScoredHop(question, None, sample, hop, "x", "x", (), (), measures, 1, **more)


def system(name, recalls, rivals=(), failed=()):
    rows = [row(f"q{i}", hop, value) for i, values in enumerate(recalls) for hop, value in enumerate(values, 1)]
    rows += [row(f"q{i}", 3, None, failure="down") for i in failed]
    return System(name, "policy", name, prompt=ZERO_SHOT, rivals=rivals), SystemResults("key", rows, 1.5)


def outcome(name, kind, values, rivals=(), measure="recall"):
    rows = [replace(row(f"q{i}", 1, None), measures={measure: value}) for i, value in enumerate(values)]
    return System(name, kind, name, prompt=ZERO_SHOT, rivals=rivals), SystemResults("key", rows, 1.0)


@pytest.fixture
def summary():
    base = system("base", [(0.0, 0.5)] * 5)
    sft = system("sft", [(0.5, 1.0)] * 3 + [(0.0, 0.5)] * 2)
    ipo = system("ipo", [(0.5, 1.0)] * 5, rivals=("sft",), failed=(4,))
    return summarise([base, sft, ipo], QUESTIONS, ["recall"], EvalRecipe(resamples=500))


def test_means_by_hop_and_type_leave_failed_questions_out_also_in_the_console(summary):
    _, sft, ipo = summary["rows"]
    # sft: hop 1 (3 x .5 + 2 x 0) / 5 = .3; hop 2 (3 x 1 + 2 x .5) / 5 = .8
    assert [hop["recall"] for hop in sft["hops"]] == [0.3, 0.8]
    low, high = sft["hops"][1]["recall_ci"]
    assert 0.5 <= low <= 0.8 <= high <= 1.0
    assert (ipo["failed"], ipo["n"], ipo["hops"][1]["recall"]) == (1, 4, 1.0)
    by_type = [(row["by_type"][t]["n"], row["by_type"][t]["hops"][1]["recall"]) for row in (sft, ipo)
               for t in ("bridge", "comparison")]  # fmt: skip
    assert by_type == [(3, 1.0), (2, 0.5), (3, 1.0), (1, 1.0)]
    assert summary["n_by_type"] == {"bridge": 3, "comparison": 2}

    columns, lines = table(summary)
    assert columns == ["system", "recall", "failed", "LM calls"]
    assert (lines[2][0], lines[2][1][:7], lines[2][2:]) == ("ipo", "1.000 [", ["1", "11"])
    assert ipo["cost"] == {"lm_calls": 2.2, "tokens": 0.0, "searches": 2.2, "seconds": 0.3}


def test_comparisons_are_of_the_last_hop_and_earlier_hops_and_types_stand_apart(summary):
    found = {(c["a"], c["b"]): (c["hop"], c["n"], c["difference"], c["p"], c["p_holm"]) for c in summary["comparisons"]}
    assert found == {
        ("sft", "base"): (2, 5, 0.3, 0.25, 0.5),  # .5 .5 .5 0 0: 2 of 8 flips, times 2
        ("ipo", "base"): (2, 4, 0.5, 0.125, 0.375),  # four of .5: 2 of 16, times 3
        ("ipo", "sft"): (2, 4, 0.125, 1.0, 1.0),  # 0 0 0 .5: both signs are as large
    }
    assert {c["hop"] for c in summary["comparisons_by_hop"]} == {1}
    assert {c["type"] for c in summary["comparisons_by_type"]} == {"bridge", "comparison"}
    nothing = summarise([], QUESTIONS, ["recall"], EvalRecipe(resamples=500))
    assert (nothing["rows"], nothing["comparisons"]) == ([], [])
    json.dumps([summary, nothing], allow_nan=False)


def summary_of(*rows, n=1, measures=("recall",)):
    results = SystemResults("key", list(rows))
    return summarise([(system("base", [])[0], results)], QUESTIONS[:n], measures, EvalRecipe(resamples=20))


def test_a_last_answer_that_does_not_parse_is_no_hop():
    last = replace(row("q0", 3, 1.0, unparsed=True), measures={"recall": 1.0, "f1": 0.0})
    summary = summary_of(row("q0", 1, 0.5), row("q0", 2, 1.0), last, measures=("recall", "f1"))
    (only,) = summary["rows"]
    assert (summary["n_hops"], [hop["recall"] for hop in only["hops"]]) == (2, [0.5, 1.0])
    assert (only["unparsed"], only["lm_calls"], only["answer"]) == (1, 3, {"f1": 0.0})


@pytest.mark.parametrize(
    ("rows", "values", "counts"),
    [
        ([row("a", 1, 0.5), row("b", 1, 0.0), row("b", 2, None, failure="x")], [[0.5, 0.5], NAN], (1, 0)),
        ([row("a", 1, 0.0, unparsed=True)], [[0.0, 0.0], NAN], (1, 1)),  # scored with what was found before
        # the mean of the runs that did not fail
        ([row("a", 1, 1.0), row("a", 1, 0.5, 1), row("a", 1, None, 2, failure="x")], [[0.75, 0.75], NAN], (1, 0)),
        ([row("a", 1, None), row("b", 1, 1.0)], [NAN, [1.0, 1.0]], (0, 0)),  # no value on this question
    ],
)
def test_rows_are_arranged_by_question_and_hop(rows, values, counts):
    scores = score_table(rows, [Task.question(name, "?") for name in "ab"], 2, ["recall"])
    np.testing.assert_equal(scores.values[:, :, 0], values)
    assert (scores.n_failed, scores.n_unparsed) == counts


def test_the_headline_without_recall_is_about_the_first_measure():
    systems = [outcome(name, "policy", [value] * 5, measure="f1") for name, value in (("base", 0.0), ("sft", 0.5))]
    made = summarise(systems, QUESTIONS, ["em", "f1", "recall"], EvalRecipe(resamples=50, baseline="base"))
    assert (made["measures"], made["n_by_measure"]) == (["f1"], {"f1": 5})
    assert headline(made) == "sft has about the same f1 as base: 0.500 against 0.000"  # p = 2 of 32


def test_bleu_is_of_all_answers_and_distinct_words_have_no_interval():
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = ["the red cat sat on the mat", "a red dog ran on the mat", "no", "the cat sat on the red mat"]
    asked = [Task.question(f"q{i}", "?", answer=text, type="ab"[i % 2]) for i, text in enumerate(texts)]
    said = {"base": ["the cat sat on the mat"] * 4, "sft": [texts[0], "a red dog on a mat", "", "the cat sat on it"]}

    def answers(name):
        rows = [row(f"q{i}", 1, None) for i in range(4)]
        for i, text in enumerate(said[name][:3]):
            last = row(f"q{i}", 2, None, prediction=json.dumps({"reply": text, "why": "x"}))
            rows.append(replace(last, measures={"bleu": 0.0, "distinct1": 0.0}))  # of single answers: not averaged
        rows.append(row("q3", 2, None, failure="down"))
        return System(name, "policy", name, prompt=ZERO_SHOT), SystemResults("key", rows, 1.0)

    settings = {"bleu": {"field": "reply"}, "distinct1": {"field": "reply"}}
    recipe = EvalRecipe(measures=settings, resamples=200)
    made = summarise([answers("base"), answers("sft")], asked, list(recipe.specs), recipe)
    bleu = {name: sacrebleu.corpus_bleu(said[name][:3], [texts[:3]]).score / 100 for name in said}
    first, last = made["rows"][1]["hops"]
    assert (first["bleu"], first["bleu_ci"]) == (None, [None, None])
    assert last["bleu"] == pytest.approx(bleu["sft"], abs=1e-6)
    assert last["bleu_ci"][0] < last["bleu"] < last["bleu_ci"][1]
    assert (last["distinct1"], last["distinct1_ci"]) == (pytest.approx(8 / 13, abs=1e-6), [None, None])
    pair = {c["measure"]: c for c in made["comparisons"]}
    assert pair["bleu"]["difference"] == pytest.approx(bleu["sft"] - bleu["base"], abs=1e-6)
    assert (pair["bleu"]["n"], pair["bleu"]["p"] is None, pair["distinct1"]["p"]) == (3, False, None)
    by_type = made["rows"][1]["by_type"]["b"]["hops"][1]["bleu"]
    assert by_type == pytest.approx(sacrebleu.corpus_bleu([said["sft"][1]], [[texts[1]]]).score / 100, abs=1e-6)
    assert json.loads(json.dumps(made)) == made


EIGHT = [Task.question(f"q{i}", "?") for i in range(8)]
RAW = outcome("raw-question", "baseline", [1.0] * 8)
NOTHING = outcome("base", "base", [0.0] * 8)
SFT = outcome("sft", "policy", [0.0] * 8)
BETTER = outcome("sft", "policy", [1.0] * 8)
BEHIND = [outcome(name, "policy", [1.0] * 2 + [0.5] * 6, ("raw-question",)) for name in ("sft", "ipo")]
BANK = outcome("bank:1", "prompt", [0.5] * 8)
ORACLE = outcome("oracle-titles", "baseline", [1.0] * 8)


@pytest.mark.parametrize(
    ("systems", "focus", "says"),
    [
        ([RAW, NOTHING, SFT], "sft", "raw-question finds more than every system with an LM: 100% of the gold"),
        ([RAW, NOTHING, *BEHIND], "sft", "raw-question finds at least as much as any system"),  # more comparisons
        ([RAW, NOTHING, BETTER], "sft", "sft finds more than base: 100% .*, against 0%; the raw question finds 100%"),
        ([NOTHING, SFT], "sft", None),
        ([ORACLE, BANK, NOTHING], None, "bank:1 finds more than base"),
    ],
)
def test_the_headline_names_the_system_that_found_most(systems, focus, says):
    made = headline(summarise(systems, EIGHT, ["recall"], EvalRecipe(resamples=200)) | {"focus": focus})
    assert made is None if says is None else re.search(says, made)
