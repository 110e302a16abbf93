import pytest

from leret.core.runs import Run
from leret.sampling.estimate import estimate
from leret.sampling.stage import sample
from tests.sampling.fakes import recipe_of
from tests.tiny import tiny_policy

READING = """
import dspy, leret

class Reading(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write, self.search = dspy.Predict("question -> query"), leret.Search()

    def forward(self, question):
        query = self.write(question=question).query
        if question != "?" and query[0] == "?":
            """


@pytest.mark.parametrize("body", ["raise KeyError('x')", "while True: self.write(question=question)"])
def test_the_plan_lets_pass_what_made_up_outputs_do_to_a_program(made, tmp_path, body):
    (tmp_path / "reading.py").write_text(READING + body)
    policy = {"model": str(tiny_policy(tmp_path / "tiny")), "enable_thinking": False}
    recipe = recipe_of(policy=policy, program={"path": f"{tmp_path}/reading.py:Reading"})
    planned = estimate(recipe, Run(tmp_path / "run"))
    assert planned.steps == 1


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


def test_the_plan_names_the_share_of_the_bank(made, tmp_path):
    planned = estimate(recipe_of(), Run(tmp_path / "run"))
    assert planned.bank_share == 0.22
    assert not any("prompt bank" in note for note in planned.notes)
    large = estimate(recipe_of(prompts=2, samples=1), Run(tmp_path / "run"))
    assert large.bank_share == round(large.bank_calls / large.lm_calls, 2) == 0.45
    note = large.notes[-1]
    assert "45% of the LM calls; lower sampling.bank.candidates (now 4)" in note
