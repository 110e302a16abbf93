import json
from pathlib import Path

import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, DataError
from leret.extras.score import main, score
from tests.datasets.writing import PLACES, array, json_lines, parquet


def scored(tmp_path, *measures, **keys):
    return score(tmp_path / "a", tmp_path / "r", EvalRecipe(measures=measures, resamples=100), **keys)


def write(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


def of(tmp_path, answers, references, *measures, **keys):
    json_lines(tmp_path / "a.jsonl", answers)
    json_lines(tmp_path / "r.jsonl", references)
    recipe = EvalRecipe(measures=measures or ("f1",), resamples=100)
    return score(tmp_path / "a.jsonl", tmp_path / "r.jsonl", recipe, **keys)


def test_text_files_are_paired_by_line_and_a_blank_line_is_an_empty_answer(tmp_path):
    write(tmp_path, a="red cat\r\n\ncat\u2028dog\n", r="red dog\nx\ncat dog\n")
    report = scored(tmp_path, "f1", "em")
    assert (report.n_answers, report.n_failed) == (3, 0)
    assert report.measures == {"f1": 0.5, "em": pytest.approx(1 / 3, abs=1e-6)}  # (1/2 + 0 + 1) / 3
    low, high = report.intervals["f1"]
    assert 0 <= low < 0.5 < high <= 1


def test_records_are_paired_by_id_and_a_failure_is_not_scored(tmp_path):
    answers = [{"id": "b", "prediction": "two"}, {"id": "a", "prediction": "one"}, {"id": "c", "prediction": None}]
    references = [
        {"id": "a", "answers": ["one", "1"]},
        {"id": "c", "answer": "x"},
        {"id": "b", "references": ["three"]},
    ]
    report = of(tmp_path, answers, references)
    assert (report.n_answers, report.n_failed, report.measures) == (3, 1, {"f1": 0.5})


def test_a_column_and_a_field_of_an_answer_can_be_named(tmp_path):
    rows = [{"said": {"reply": "one", "why": "x"}, "references": ["one"]}]
    assert of(tmp_path, rows, rows, "em", field="said").measures == {"em": 0.0}
    with pytest.raises(DataError, match=r"no field 'prediction'.*'said', 'references'"):
        of(tmp_path, rows, rows)


@pytest.mark.parametrize(
    ("answers", "references", "says"),
    [
        ([{"text": "x"}] * 2, [{"text": "x"}] * 3, r"has 2 answers, but .*has 3 references; add ids to .*a\.jsonl"),
        ([{"id": i, "text": "x"} for i in "ab"], [{"id": i, "text": "x"} for i in "bcd"],
         r"1 ids of .*a\.jsonl are not in .*r\.jsonl, for example 'a'"),
        ([{"id": "b", "text": "x"}], [{"id": i, "text": "x"} for i in "bcd"],
         r"2 ids of .*r\.jsonl are not in .*a\.jsonl, for example 'c'"),
        ([{"id": "a", "text": "x"}] * 2, [{"id": "a", "text": "x"}], r"a\.jsonl: id 'a' occurs more than once"),
        ([{"id": "a", "text": "x"}, {"text": "x"}], [{"text": "x"}] * 2, r"a\.jsonl: some records have an id"),
        ([{"text": 5}], [{"text": "x"}], r"a\.jsonl:1: the answer is 5"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_with_the_place(tmp_path, answers, references, says):
    with pytest.raises(DataError, match=says):
        of(tmp_path, answers, references)


def test_a_measure_of_rankings_and_an_unreadable_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="recall does not apply to answers"):
        of(tmp_path, [{"text": "x"}], [{"text": "x"}], "recall")
    write(tmp_path, a="", r="x")
    with pytest.raises(DataError, match="a is empty"):
        scored(tmp_path, "f1")
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        scored(tmp_path, "f1")


def test_measures_of_a_file_equal_sacrebleu(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["the cat sat on the mat", "", "well, it's a dog", "i do not know what you mean"]
    references = ["a cat sat on the mat", "yes", "it is a well-known dog", "i do not know what that means"]
    write(tmp_path, a="\n".join(answers) + "\n", r="\n".join(references) + "\n")
    found = scored(tmp_path, "bleu", "sentence_bleu", "corpus_length_ratio").measures
    words = [sum(len(text.split()) for text in texts) for texts in (answers, references)]
    sentences = [sacrebleu.sentence_bleu(a, [r]).score / 100 for a, r in zip(answers, references, strict=True)]
    assert found == pytest.approx({
        "bleu": sacrebleu.corpus_bleu(answers, [references]).score / 100,
        "sentence_bleu": sum(sentences) / 4,
        "corpus_length_ratio": words[0] / words[1],
    }, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    ("prediction", "answer", "f1", "n_failed", "n_without_reference"),
    [("  ", "rome", 0.5, 0, 0), ("rome", " ", 1.0, 0, 1), (None, "rome", 1.0, 1, 0)],
    ids=["blank answer", "blank reference", "failure"],
)
def test_blank_and_null_texts_mean_the_same_in_every_format(
    tmp_path, prediction, answer, f1, n_failed, n_without_reference
):
    answers = [{"id": "1", "prediction": prediction}, {"id": "2", "prediction": "paris"}]
    references = [{"id": "1", "answer": answer}, {"id": "2", "answer": "paris"}]
    for written in PLACES if prediction is not None else (json_lines, array, parquet):  # CSV and TSV have no null
        files = (Path(written(tmp_path / f"{name}.json", rows)) for name, rows in (("p", answers), ("r", references)))
        report = score(*files, EvalRecipe(measures=("f1",), resamples=9))
        assert (report.measures["f1"], report.n_failed) == (f1, n_failed), written
        assert report.n_without_reference == n_without_reference, written


def test_two_files_of_texts_are_scored_by_the_command(tmp_path, capsys):
    write(tmp_path, a="red cat\n\n", r="red dog\nx\n")
    files = [str(tmp_path / "a"), "--references", str(tmp_path / "r")]
    assert main([*files, "--measures", "f1, em"]) == 0
    assert "f1                   0.2500 [" in capsys.readouterr().out
    assert main([*files, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["measures"], report["n_answers"]) == ({"f1": 0.25}, 2)
    assert main([*files, "--measures", "bluh"]) == 2
    assert "--measures: unknown measure 'bluh'" in capsys.readouterr().err
