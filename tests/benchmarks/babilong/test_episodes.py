import json

import pytest

from benchmarks.babilong.__main__ import sweep
from benchmarks.babilong.episodes import early_stop, file_name, write_log
from benchmarks.babilong.sweep import sweep_table
from leret.config.evaluation import EvalDataSettings
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Task
from leret.evaluation.results import ScoredHop, read_rows
from leret.policies.base import Completion
from leret.rewards import scoring
from tests.evaluation.eval_fakes import asks
from tests.first_steps import read_lines
from tests.sampling.fakes import ROOT, recipe_of

CHUNKS = ["Mary took the milk.", "John slept.", "Mary went home.", "The ship sailed away over the sea."]
TASKS = [Task("a", {"question": "Where is the milk?", "chunks": CHUNKS}, ("0", "2"), ("home",))]


def picks(task_id, *chosen, failure=None):
    of = (None, (), (), {}, 1, False, failure)
    return [ScoredHop(task_id, None, 0, i, id, *of, value) for i, (id, value) in enumerate(chosen, 1)]


def logged(path, *arguments):
    write_log(path, *arguments)
    return read_lines(path)


def test_a_line_tells_what_was_picked_and_what_it_was_worth(tmp_path):
    rows = picks("a", ("0", 0.9), ("3", 0.2))
    [line] = logged(tmp_path / "l", rows, [*TASKS, Task("b", {"question": "?"})], {}, scoring("recall"))
    assert line == {
        "id": "a", "question": "Where is the milk?", "answer": "home", "support": ["0", "2"], "picked": ["0", "3"],
        "q_values": [0.9, 0.2], "texts": [CHUNKS[0], CHUNKS[3]], "return": 0.5, "f1": 0.5, "em": 0.0,
        "gold_within": 0.0,
    }  # fmt: skip
    rows = picks("a", ("0", 1), ("2", 1), ("1", 1))  # em wants the gold facts alone, gold_within any more
    [line] = logged(tmp_path / "l", rows, TASKS, {}, scoring("all_found"))
    assert (line["em"], line["gold_within"], line["f1"], line["return"]) == (0.0, 1.0, 0.8, 1.0)


def test_a_higher_threshold_ends_earlier_but_after_one_pick():
    rows = picks("a", ("0", 0.9), ("2", 0.8), ("1", 0.1))
    found = early_stop(rows, TASKS)
    assert (found[0]["threshold"], found[-1]["threshold"]) == (pytest.approx(0.1), pytest.approx(0.9))
    assert (found[0]["picks"], found[0]["fact_f1"], found[0]["all_found"]) == (3, 0.8, 1)
    assert (found[-1]["picks"], found[-1]["fact_f1"], found[-1]["all_found"]) == (1, pytest.approx(2 / 3), 0)
    assert {point["fact_f1"] for point in found if point["picks"] == 2} == {1.0}
    assert early_stop(picks("a", ("0", None)), TASKS) == []


class FirstOfTheGold:
    name = digest = "names"

    async def complete(self, request):
        good = [one for one in request.choice.candidates if one.text.startswith(("Mary", "John"))]
        return [Completion((good or request.choice.candidates)[-1].id, "stop", 0, 0, value=0.5) for _ in request.seeds]

    async def aclose(self):
        pass


@pytest.fixture
def picking(tmp_path, monkeypatch):
    monkeypatch.setattr("leret.evaluation.runner.make_policy", lambda settings: FirstOfTheGold())
    stories = [
        f"1 Mary took the milk {i}.\n2 Mary went home {i}.\n3 Where is the milk?\thome\t1 2\n" for i in range(20)
    ]
    (tmp_path / "qa2.txt").write_text("".join(stories))
    (tmp_path / "book.txt").write_text("\n\n".join(f"The ship number {i} sailed away over the sea." for i in range(30)))
    data = {"kind": "babilong", "questions": f"{tmp_path}/qa2.txt", "noise": [f"{tmp_path}/book.txt"], "sentences": 6}
    program = {"path": f"{ROOT}/pipelines/picks.py:Picks", "budget": 2}
    recipe = recipe_of(policy={"model": "demo"}, reward="all_found")
    values = {**recipe.model_dump(), "data": data, "program": program, "retriever": {"kind": "none"}}
    recipe = type(recipe).model_validate(values)
    run = Run.create(tmp_path / "run")
    run.update(sampling=recipe.model_dump(mode="json"))
    return run


def test_lengths_are_evaluated_in_one_call_with_logs_of_episodes(picking):
    recipe = asks("raw-question", "oracle-titles", "base", measures=("fact_em", "fact_f1"))
    reports = sweep(recipe, picking, [4, 20], Progress())
    assert sweep(recipe, picking, [4], Progress())[0].already
    points = json.loads((picking.eval / "sweep.json").read_text())
    assert points["lengths"] == [4, 20]
    fact_em = {row["system"]: [point["fact_em"] for point in row["points"]] for row in points["rows"]}
    assert (fact_em["oracle-titles"], fact_em["base"]) == ([1, 1], [1, 1])
    columns, rows = sweep_table([report.summary for report in reports])
    assert (columns, rows[1][:1]) == (["fact EM at", "4", "20"], ["oracle-titles"])
    assert "<svg" in (picking.eval / "sweep.svg").read_text()
    for report, n in zip(reports, (4, 20), strict=True):
        log = read_lines(picking.eval / f"ns{n}" / "base" / file_name(0, n))
        assert len(log) == report.summary["n_questions"]
        assert all(line["em"] == 1 and line["q_values"] == [0.5, 0.5] for line in log)
        assert json.loads((picking.eval / f"ns{n}" / "base" / "early_stop.json").read_text())[0]["picks"] == 2
        rows = read_rows(picking.eval / f"ns{n}" / "base" / "per_question.parquet")
        assert [row.value for row in rows] == [0.5] * len(rows)
    assert "Picks makes up to 2 picks per question over babilong." in reports[-1].page.read_text()


def test_the_seed_of_an_evaluation_moves_its_noise_and_names_it(picking):
    recipe = asks("raw-question", data={"sentences": 9}, seed=3)
    sweep(recipe, picking, [], Progress())
    assert (picking.eval / "ns9-seed3" / "raw-question" / "eval_seed3_ns9.jsonl").is_file()
    assert recipe.changes == {"sentences": 9, "noise_seed": 3}
    assert asks("base", data=EvalDataSettings()).changes == {}
