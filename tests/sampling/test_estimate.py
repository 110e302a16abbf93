from leret.core.runs import Run
from leret.programs.prompts import Prompt
from leret.sampling.estimate import estimate
from leret.sampling.stage import sample
from tests.sampling.fakes import recipe_of


def test_the_plan_bounds_what_the_stage_does_and_writes_nothing(made, tmp_path):
    run = Run(tmp_path / "run")
    planned = estimate(recipe_of(), run)
    assert not run.path.exists()
    assert (planned.questions, planned.steps, planned.states, planned.samples) == (30, 2, 60, 360)
    assert (planned.bank_calls, planned.lm_calls) == (2 * (10 + 4 * 10), 360 + 100)
    report = sample(recipe_of(), Run.create(run.path))
    assert report.samples <= planned.samples
    assert sum(len(request.seeds) for request in made[0].requests) <= planned.lm_calls
    after = estimate(recipe_of(), run)
    assert (after.stored_samples, after.bank_ready, after.bank_calls) == (report.samples, True, 0)


def test_prompts_of_a_folder_cost_no_calls(made, tmp_path):
    Prompt("mine", {"write_query": [{"question": "Who?", "context": [], "query": "who"}]}).save(tmp_path / "mine.json")
    run = Run(tmp_path / "run")
    planned = estimate(recipe_of(prompts=2, bank={"path": str(tmp_path)}), run)
    assert (planned.bank_calls, planned.lm_calls, planned.bank_share) == (0, planned.samples, 0)
    sample(recipe_of(prompts=2, bank={"path": str(tmp_path)}), Run.create(run.path))
    assert sum(len(request.seeds) for request in made[0].requests) <= planned.lm_calls
