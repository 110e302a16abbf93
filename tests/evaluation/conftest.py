import pytest

from leret.config.sampling import ProgramSettings
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from tests.sampling.fakes import ROOT, recipe_of, write_data
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base"))


@pytest.fixture
def sampling_recipe(tmp_path, base):
    write_data(tmp_path, n=60)
    (tmp_path / "program.py").write_text((ROOT / "pipelines/multihop.py").read_text())
    data = {"corpus": f"{tmp_path}/corpus.jsonl", "questions": f"{tmp_path}/questions.jsonl", "split": "train"}
    recipe = recipe_of(prompts=1, data={**data, "limit": 4}, policy={"model": str(base), "max_tokens": 6})
    program = ProgramSettings(path=f"{tmp_path}/program.py:MultiHop", adapter=recipe.program.adapter)
    return recipe.model_copy(update={"program": program})


@pytest.fixture
def run(tmp_path, sampling_recipe):
    run = Run.create(tmp_path / "run")
    run.update(sampling=sampling_recipe.model_dump(mode="json"))
    run.prompts.mkdir()
    Prompt("1", {"write_query": [{"question": "who ?", "query": "song"}]}).save(run.prompts / "1.json")
    return run
