from pathlib import Path

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.errors import RunError
from leret.core.runs import Run
from leret.rollouts.environment import Environment, refuse_changes
from leret.sampling.stage import sample
from tests.sampling.fakes import recipe_of


def test_what_decides_a_sample_may_not_change(sampled):
    changes = {"samples": 3, "policy": {"temperature": 0.5}, "bank": {"max_demos": 1}}
    with pytest.raises(RunError, match="name a new run directory") as raised:
        sample(recipe_of(**changes), sampled, base_dir=sampled.path.parent)
    for line in (
        "samples: 2 in the run, 3 in the recipe",
        "temperature: 1.0 in the run, 0.5",
        "max_demos: 2 in the run, 1",
    ):
        assert line in str(raised.value)


def test_a_run_of_an_older_version_lacks_keys_that_have_their_defaults_now(sampled, tmp_path):
    recorded, run = sampled.manifest.sampling, Run.create(tmp_path / "older")
    del recorded["sampling"]["final_weight"]
    run.update(sampling=recorded)
    refuse_changes(run, SamplingRecipe.model_validate(recorded), {})
    recorded["sampling"]["final_weight"] = 0.25
    with pytest.raises(RunError, match=r"sampling\.final_weight: 0\.5 in the run, 0\.25"):
        refuse_changes(run, SamplingRecipe.model_validate(recorded), {})


def test_a_file_that_changed_is_noticed_at_any_limit(run):
    sample(recipe_of(prompts=1, data={"limit": 8}), run)
    file = Path("questions.jsonl")
    file.write_text(file.read_text().replace('["alpha", "beta"]', '["alpha"]'))
    with pytest.raises(RunError, match="questions: its content"):
        sample(recipe_of(prompts=1, data={"limit": 6}), run)


def test_gold_ids_in_a_cell_are_split_with_and_without_a_check(tmp_path):
    (tmp_path / "c.csv").write_text("doc_id,text\nd1,a\nd2,b\n")
    (tmp_path / "q.csv").write_text("id,question,relevant_doc_ids\nq1,Who?,d1|d2\nq2,Who else?,d2\n")
    data = {"questions": str(tmp_path / "q.csv"), "corpus": str(tmp_path / "c.csv")}
    for check in (True, False):
        environment = Environment(recipe_of(data), tmp_path)
        assert [task.gold for task in environment.tasks(check=check)] == [("d1", "d2"), ("d2",)]
