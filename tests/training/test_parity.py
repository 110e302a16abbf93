"""What is trained is what was sent: token by token against the engine that samples, and refused where it is not."""

import asyncio
import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from leret.config.sampling import SamplingRecipe
from leret.config.training import TrainingRecipe
from leret.core.bundled import demo_policy
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.algorithms.losses import PairCollator
from leret.training.algorithms.preference import preference_rows
from leret.training.data import Example, read_preferences
from leret.training.initial import find_initial
from leret.training.model import load_model, load_tokenizer, stop_ids
from leret.training.parity import check_parity
from leret.training.tokens import Encoder, end_token

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of the demo's policy on a few questions of its world, under a copy of the program."""
    directory = tmp_path_factory.mktemp("parity")
    shutil.copy(ROOT / "pipelines/multihop.py", directory / "multihop.py")
    recipe = SamplingRecipe.model_validate(
        {
            "data": {"kind": "world", "options": {"n_train": 20, "n_dev": 5, "n_test": 5}, "limit": 6},
            "policy": {"kind": "local", "model": "demo", "max_tokens": 12},
            "program": {"path": f"{directory}/multihop.py:MultiHop", "hops": 2, "adapter": {"kind": "compact"}},
            "sampling": {"prompts": 1, "samples": 6},
        }
    )
    run = Run.create(directory / "run")
    assert sample(recipe, run).pairs > 0
    return run


@pytest.fixture
def run(original, tmp_path):
    """A copy, to be changed."""
    shutil.copytree(original.path.parent, tmp_path / "copy")
    copy = Run(tmp_path / "copy/run")
    section = copy.manifest()["sampling"]
    section["program"]["path"] = f"{tmp_path}/copy/multihop.py:MultiHop"
    copy.update(sampling=section)
    return copy


@pytest.fixture(scope="module")
def encoder(original):
    initial = find_initial(original, "base")
    model = load_model(initial, TrainingRecipe(algorithm="ipo"), "cpu")
    tokenizer = load_tokenizer(initial)
    return Encoder(tokenizer, end_token(tokenizer, stop_ids(model)))


def check(run, encoder, examples=None):
    examples = read_preferences(run.preferences) if examples is None else examples
    check_parity(run, find_initial(run, "base"), encoder, examples, encoder.encode(examples))


def test_the_trainer_gets_the_tokens_that_the_engine_sampled(original, encoder):
    """Prompt and completion ids of the engine, against those of the preference rows that reach TRL's loss."""
    with Store(original.store, read_only=True) as store:
        groups = list(store.groups())
    policy = LocalPolicy(demo_policy(), threads=1)
    try:
        asked = [Request(g.state.messages, tuple(range(4)), 1.0, 12) for g in groups]
        completed = [pair for request in asked for pair in [(request, asyncio.run(policy.complete(request)))]]
        n = 0
        for request, completions in completed:
            first, second = completions[:2]
            example = Example("q", request.messages, (first.text, second.text))
            encoded = encoder.encode([example])
            row = {name: values[0] for name, values in preference_rows(encoded).items()}
            batch = PairCollator(encoder.tokenizer.pad_token_id, sequence=False, shared=False)(
                [{**row, "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}]
            )
            prompt = list(policy._encoder.encode(request.messages).token_ids)
            assert len(prompt) == first.n_prompt_tokens
            for place, completion in enumerate((first, second)):
                if completion.finish_reason != "stop":
                    continue  # cut off: training adds the end that the sampler did not come to
                sampled = [*prompt, *completion.token_ids]
                ids = batch["input_ids"][place][batch["attention_mask"][place].bool()].tolist()
                assert ids == sampled
                marked = batch["completion_mask"][place].bool()
                assert batch["input_ids"][place][marked].tolist() == list(completion.token_ids)
                n += 1
        assert n >= 10
    finally:
        policy.close()


def test_a_run_as_it_was_sampled_passes(original, encoder):
    check(original, encoder)
    assert not [event for event in original.events() if event["event"] == "messages not checked"]


def test_a_program_that_has_changed_is_refused(run, encoder):
    path = run.path.parent / "multihop.py"
    path.write_text(
        path.read_text().replace("context: list[str]", "passages: list[str]").replace("context=found", "passages=found")
    )
    with pytest.raises(TrainingError, match="the program no longer sends what was sampled") as caught:
        check(run, encoder)
    assert "sampled:" in str(caught.value)
    assert "today:" in str(caught.value)


def test_a_predictor_that_is_gone_is_refused(run, encoder):
    path = run.path.parent / "multihop.py"
    path.write_text(path.read_text().replace("self.write_query", "self.ask"))
    with pytest.raises(TrainingError, match="has no predictor 'write_query' any more"):
        check(run, encoder)


def test_another_adapter_is_refused(run, encoder):
    section = run.manifest()["sampling"]
    section["program"]["adapter"]["words_per_item"] = 2
    run.update(sampling=section)
    with pytest.raises(TrainingError, match="step 1: the program no longer sends what was sampled"):
        check(run, encoder)


def test_preferences_that_were_edited_are_refused(run, encoder):
    path = run.preferences / "train.parquet"
    table = pyarrow.parquet.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        row["prompt"][-1]["content"] += " please"
    pyarrow.parquet.write_table(type(table).from_pylist(rows, table.schema), path)
    with pytest.raises(TrainingError, match="what would be trained is not what was sent") as caught:
        check(run, encoder)
    assert "please" in str(caught.value)
    assert "leret pairs" in str(caught.value)


def test_a_sampler_that_counted_other_tokens_is_refused(run, encoder):
    import sqlite3

    with sqlite3.connect(run.store) as database:
        database.execute("UPDATE samples SET n_prompt_tokens = n_prompt_tokens + 1")
    with pytest.raises(TrainingError, match=r"the sampler counted \d+ tokens in the zero-shot prompt; .* makes \d+"):
        check(run, encoder)


def test_a_tokenizer_that_encodes_prompts_in_two_ways_is_refused(original, encoder):
    class Twofold:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, texts, **settings):
            encoding = self.inner(texts, **settings)
            return {"input_ids": [[5, *ids] for ids in encoding["input_ids"]]}

    with pytest.raises(
        TrainingError, match="the prompt that would be trained is not the one that is sampled, from token"
    ):
        check(original, Encoder(Twofold(encoder.tokenizer), encoder.end))


def test_a_program_that_cannot_be_opened_is_noted(run, encoder):
    (run.path.parent / "multihop.py").unlink()
    check(run, encoder)
    events = [event for event in run.events() if event["event"] == "messages not checked"]
    assert "multihop.py" in json.dumps(events)
