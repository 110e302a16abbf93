import json

import numpy as np
import pytest
from scipy import stats

from leret.core.errors import ConfigError, RunError
from leret.evaluation.report.comparison import compare_runs, latex, markdown, tables
from leret.evaluation.statistics import Resampling, compare, with_holm
from tests.evaluation.report.runs_fakes import evaluated, sampled

RNG = np.random.default_rng(3)
BASE, IPO = (
    [RNG.choice([0.0, 0.5, 1.0], 10, p=p).tolist() for _ in range(3)] for p in ((0.6, 0.3, 0.1), (0.2, 0.3, 0.5))
)


def seed(path, i, **settings):
    return evaluated(path / f"seed-{i}", {"base": BASE[i], "ipo": IPO[i]}, seed=i, **settings)


def seeds(path):
    return [seed(path, i) for i in range(3)]


def test_seeds_are_averaged_by_question_and_agree_with_scipy(tmp_path):
    result = compare_runs(seeds(tmp_path))
    differences = np.mean(IPO, axis=0) - np.mean(BASE, axis=0)
    [row], options = result["comparisons"], {"rng": 1, "n_resamples": 9999}
    assert (row["a"], row["b"], row["n"]) == ("ipo", "base", 10)
    assert row["difference"] == pytest.approx(differences.mean(), abs=1e-6)
    exact = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert row["p"] == row["p_holm"] == pytest.approx(exact.pvalue, abs=1e-6)
    assert row["ci"] == pytest.approx(
        stats.bootstrap((differences,), np.mean, method="percentile", **options).confidence_interval, abs=0.02
    )
    error = stats.sem(differences)
    assert row["effect_size"] == pytest.approx(differences.mean() / (error * 10**0.5), abs=1e-5)
    assert stats.norm.sf(stats.norm.isf(0.025) - row["detectable"] / error) == pytest.approx(0.8, abs=1e-4)
    ipo = result["systems"][1]
    assert (ipo["runs"], ipo["recall_by_run"]) == (3, pytest.approx(np.mean(IPO, axis=1), abs=1e-6))


def test_one_run_has_the_figures_of_its_summary_and_its_completions(tmp_path):
    run = evaluated(tmp_path / "run", {"base": BASE[0], "sft": BASE[1], "grpo": IPO[0]})
    (run.path / "sample.done").write_text(json.dumps({"report": {"samples": 9600}}))
    for name, log in (("sft", {"loss": 1.0}), ("grpo", {"num_completions": 64.0})):
        (run.policies / name).mkdir(parents=True)
        note = {"rounds": 150, "steps": 300, "log_history": [log]}
        (run.policies / name / "training.json").write_text(json.dumps(note))
    summary = json.loads((run.eval / "summary.json").read_text())
    result = compare_runs([run])
    for row, expected in zip(result["comparisons"], summary["comparisons"], strict=True):
        assert {name: row[name] for name in expected if name != "hop"} | {"hop": 1} == expected
    assert [row["recall_ci"] for row in result["systems"]] == [row["hops"][0]["recall_ci"] for row in summary["rows"]]
    assert result["completions"] == {str(run.path): {"sampled": 9600, "grpo": 9600}}
    title, _, rows = tables(result)[-1]
    assert title == "completions that each run used"
    assert rows == [[str(run.path), "sampled 9,600, grpo 9,600"]]


def test_other_recipes_are_compared_with_the_first_by_system(tmp_path):
    runs = seeds(tmp_path / "one")[:2]
    runs.append(evaluated(tmp_path / "other", {"base": np.mean(BASE[:2], axis=0).tolist(), "ipo": IPO[2]}, beta=0.5))
    result = compare_runs(runs)
    assert {name: len(paths) for name, paths in result["groups"].items()} == {"seed-0": 2, "other": 1}
    assert [(row["a"], row["b"]) for row in result["comparisons"]] == [("other: ipo", "seed-0: ipo")]  # base is equal


def test_runs_that_differ_or_have_no_evaluation_and_an_unknown_measure_are_refused(tmp_path):
    one = evaluated(tmp_path / "a", {"ipo": IPO[0]})
    other = evaluated(tmp_path / "b", {"ipo": IPO[0]}, questions="P", k=5, corpus="D", gold="title")
    with pytest.raises(ConfigError) as error:
        compare_runs([one, other])
    assert [problem.split()[0] for problem in error.value.problems] == ["corpus", "data.gold", "retriever.k"]
    assert f"3 in {one.path} but 5 in {other.path}" in error.value.problems[2]
    with pytest.raises(ConfigError, match="available: recall"):
        compare_runs([one], "f1")
    with pytest.raises(RunError, match="leret eval"):
        compare_runs([sampled(tmp_path / "new")])


def test_a_limit_compares_common_questions_and_none_is_refused(tmp_path):
    whole, part, apart = (
        evaluated(tmp_path / name, {"ipo": scores}, questions=name, first=first, beta=first)
        for name, scores, first in (("a", IPO[0], 0), ("b", IPO[1][:4], 2), ("c", IPO[2], 50))
    )
    assert [row["n"] for row in compare_runs([whole, part])["comparisons"]] == [4]
    with pytest.raises(ConfigError, match=r"data\.seed"):
        compare_runs([whole, apart])


def test_each_generated_world_has_its_own_questions(tmp_path):
    runs = [seed(tmp_path, i, corpus=f"C{i}", kind="world", questions=f"{i}") for i in (0, 1)]
    [row] = compare_runs(runs)["comparisons"]
    assert (row["n"], row["difference"]) == (20, pytest.approx(np.mean(IPO[:2]) - np.mean(BASE[:2]), abs=1e-6))


def test_a_question_that_failed_in_any_seed_is_left_out(tmp_path):
    failed = evaluated(tmp_path / "failed", {"base": BASE[1], "ipo": [*IPO[1][:9], None]}, seed=1)
    result = compare_runs([seed(tmp_path, 0), failed])
    assert ([row["n"] for row in result["systems"]], result["comparisons"][0]["n"]) == ([10, 9], 9)


def test_null_differences_are_significant_in_one_of_twenty():
    """Three seeds of equal systems on 100 questions, in 500 tables of four systems and a baseline."""
    rng, n = np.random.default_rng(2), 500
    values = rng.random((100, 1, 1)) + rng.random((3, 100, n, 5)).mean(axis=0)  # questions, tables, systems
    cubes = {str(i): values[:, :, [i]] for i in range(5)}
    rows = compare([(str(i), "0") for i in range(1, 5)], cubes, [""], Resampling(1000))
    tables = [with_holm(rows[table::n]) for table in range(n)]
    assert 0.04 <= np.mean([row["p"] < 0.05 for row in rows]) <= 0.06
    assert np.mean([any(row["p_holm"] < 0.05 for row in table) for table in tables]) <= 0.05


def test_tables_are_escaped_markdown_and_latex(tmp_path):
    [(_, columns, rows), (title, *_)] = tables(compare_runs(seeds(tmp_path)))
    assert (columns, title) == (["system", "recall", "by run", "questions"], "differences in recall")
    assert markdown(["a", "b"], [["x|y", "1"]]).splitlines() == ["| a | b |", "| --- | ---: |", "| x&#124;y | 1 |"]
    lines = latex(["a", "b"], [["x_1 & 5%", r"\^"]]).splitlines()
    assert lines[0] == r"\begin{tabular}{lr}"
    assert lines[4] == r"x\_1 \& 5\% & \textbackslash{}\textasciicircum{} \\"
    assert rows[1][0] == "ipo"
