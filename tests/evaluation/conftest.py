import json

import pytest

from leret.config.sampling import ProgramSettings
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from tests.sampling.fakes import ROOT, recipe_of, write_data
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base"))


def sampling_recipe(folder, base):
    write_data(folder, n=60)
    (folder / "program.py").write_text((ROOT / "pipelines/multihop.py").read_text())
    data = {"corpus": f"{folder}/corpus.jsonl", "questions": f"{folder}/questions.jsonl", "split": "train"}
    recipe = recipe_of(prompts=1, data={**data, "limit": 4}, policy={"model": str(base), "max_tokens": 6})
    program = ProgramSettings(path=f"{folder}/program.py:MultiHop", adapter=recipe.program.adapter)
    return recipe.model_copy(update={"program": program})


@pytest.fixture
def run(tmp_path, base):
    run = Run.create(tmp_path / "run")
    run.update(sampling=sampling_recipe(tmp_path, base).model_dump(mode="json"))
    run.prompts.mkdir()
    Prompt("1", {"write_query": [{"question": "who ?", "query": "song"}]}).save(run.prompts / "1.json")
    return run


@pytest.fixture
def answer_run(tmp_path, run):
    file = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{"id": row["id"], "question": row["question"], "answers": row["relevant_doc_ids"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = {**run.manifest.sampling["program"], "path": f"{ROOT}/tests/programs/zoo.py:TwoPredictors"}
    run.update(sampling={**run.manifest.sampling, "program": program})
    return run
