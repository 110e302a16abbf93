"""A small run with a real policy and a real index."""

import pytest

from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.programs.prompts import Prompt
from tests.evaluation.eval_fakes import MULTIHOP, write_data
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base"))


@pytest.fixture
def sampling_recipe(tmp_path, base):
    write_data(tmp_path)
    (tmp_path / "program.py").write_text(MULTIHOP.read_text())
    return SamplingRecipe.model_validate(
        {
            "data": {"corpus": f"{tmp_path}/corpus.jsonl", "questions": f"{tmp_path}/questions.jsonl"},
            "retriever": {"k": 2},
            "policy": {"model": str(base), "max_tokens": 6},
            "program": {"path": f"{tmp_path}/program.py:MultiHop", "adapter": {"kind": "compact"}},
        }
    )


@pytest.fixture
def run(tmp_path, sampling_recipe):
    """Not sampled, but with a prompt in its bank."""
    run = Run.create(tmp_path / "run")
    run.update(sampling=sampling_recipe.model_dump(mode="json"))
    run.prompts.mkdir()
    Prompt("1", {"write_query": [{"question": "who ?", "query": "song"}]}, score=0.5).save(run.prompts / "1.json")
    return run
