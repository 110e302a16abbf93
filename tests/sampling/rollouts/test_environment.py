"""What may not change in a run that was begun: the recipe's keys, and the contents of its files."""

import json
from pathlib import Path

import pytest

from leret.core.errors import RunError
from leret.core.runs import Run
from leret.sampling.stage import sample
from tests.sampling.fakes import open_fakes, recipe_of, write_data


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A directory of data, and a finished run on it, to be left as it is."""
    directory = tmp_path_factory.mktemp("sampled")
    write_data(directory)
    run = Run.create(directory / "run")
    with pytest.MonkeyPatch.context() as patch:
        open_fakes(patch)
        sample(recipe_of(prompts=1), run, base_dir=directory)
    return directory, run


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"samples": 3}, "sampling.samples: 2 in the run, 3 in the recipe"),
        ({"seed": 9}, "sampling.seed: 1 in the run, 9 in the recipe"),
        ({"reward": "recall"}, "sampling.reward: 'ap' in the run"),
        ({"policy": {"temperature": 0.5}}, "policy.temperature: 1.0 in the run, 0.5"),
        ({"data": {"split": "train"}}, "data.split: 'all' in the run"),
        ({"bank": {"max_demos": 1}}, "sampling.bank.max_demos: 2 in the run, 1"),
    ],
)
def test_what_decides_a_sample_may_not_change(sampled, change, key):
    directory, run = sampled
    with pytest.raises(RunError) as raised:
        sample(recipe_of(**{"prompts": 1, **change}), run, base_dir=directory)
    assert key in str(raised.value)
    assert "name a new run directory" in str(raised.value)


@pytest.mark.parametrize("limit", [6, None])
def test_gold_that_changed_is_noticed_under_any_limit(run, limit):
    sample(recipe_of(prompts=1, data={"limit": 8}), run)
    file = Path("questions.jsonl")
    file.write_text(file.read_text().replace('["alpha", "beta"]', '["alpha"]'))
    with pytest.raises(RunError, match=r"questions: its content"):
        sample(recipe_of(prompts=1, data={"limit": limit}), run)


def test_a_corpus_that_changed_is_noticed(run):
    sample(recipe_of(prompts=1), run)
    with Path("corpus.jsonl").open("a") as file:
        file.write(json.dumps({"doc_id": "new", "title": "", "text": "alpha"}) + "\n")
    with pytest.raises(RunError, match=r"corpus: its content"):
        sample(recipe_of(prompts=1), run)
