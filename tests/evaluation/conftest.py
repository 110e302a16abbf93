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


ANSWERER = """
import dspy
from leret import Search


class Answerer(dspy.Module):
    def __init__(self, k=1):
        super().__init__()
        self.search = Search(k=k)
        self.write = dspy.Predict("question -> query")
        self.answer = dspy.Predict("question, context: list[str] -> answer")

    def forward(self, question):
        found = self.search(f"{question} {self.write(question=question).query}")
        return self.answer(question=question, context=found.passages)
"""


@pytest.fixture
def answer_run(tmp_path, run):
    file = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{"id": row["id"], "question": row["question"], "answers": row["relevant_doc_ids"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "answerer.py").write_text(ANSWERER)
    program = {**run.manifest.sampling["program"], "path": f"{tmp_path}/answerer.py:Answerer"}
    run.update(sampling={**run.manifest.sampling, "program": program})
    return run
