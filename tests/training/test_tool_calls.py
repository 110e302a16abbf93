"""Native tool calls through all stages: sampled, stored, trained and evaluated, with completions from a script."""

import asyncio
import json
import random
from collections import Counter

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from benchmarks.correctness import tool_calls
from leret.config.evaluation import EvalRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.datasets.splits import split_of
from leret.evaluation.stage import evaluate
from leret.extras.trl import GRPOWithTRL
from leret.policies.local.decoder import Decoder, Generated
from leret.policies.tool_calls import read_calls
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.data import plain
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from leret.training.stored.sft import SFTRecipe, sft_rows
from tests.datasets.writing import json_lines
from tests.first_steps import succeeds
from tests.sampling.fakes import recipe_of
from tests.training.training_runs import train_ids

KEYS = {"learning_rate": 1e-3, "device": "cpu", "logging_steps": 1}
ONLINE = {**KEYS, "num_generations": 4, "questions_per_round": 2, "max_steps": 1, "max_completion_length": 64}


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tool_calls.tool_policy(tmp_path_factory.mktemp("tools") / "policy", n_steps=0, n_runs=60)


@pytest.fixture
def script(directory, monkeypatch):
    tokenizer, decoded = AutoTokenizer.from_pretrained(directory), []

    def run(self, jobs):
        answers = []
        for job in jobs:
            n_results = tokenizer.decode(list(job.token_ids)).count("<tool_response>")
            texts = [tool_calls.written(n_results, random.Random(seed)) for seed in job.seeds]
            ids = [(*tokenizer(text)["input_ids"], tokenizer.eos_token_id) for text in texts]
            decoded.extend((job.token_ids, one) for one in ids)
            answers.append([Generated(one, (-1.0,) * len(one), "stop") for one in ids])
        return answers

    monkeypatch.setattr(Decoder, "run", run)
    return decoded


def test_trained_ids_are_sampled_ids_through_a_server_that_sends_them(directory, script):
    figures = asyncio.run(tool_calls.roll_out(directory, 6, served=True))
    assert figures["online"] == figures["text"] == figures["rollouts"] == 6
    assert figures["tool calls"] > 9
    with pytest.raises(TrainingError, match="sent tool calls without token ids"):
        asyncio.run(tool_calls.roll_out(directory, 2, served=True, ids=False))


@pytest.fixture
def recipe(directory, tmp_path):
    words = tool_calls.WORDS
    dev = [id for id in (f"q{i}" for i in range(200)) if split_of(id) == "dev"]
    tasks = [{"id": id, "question": f"{word} of it", "relevant_doc_ids": [word], "answer": word}
             for id, word in zip([*train_ids(6), *dev[:2]], words, strict=False)]  # fmt: skip
    json_lines(tmp_path / "q.jsonl", tasks)
    json_lines(tmp_path / "c.jsonl", [{"doc_id": word, "title": word, "text": f"near the {word}"} for word in words])
    return recipe_of(
        {"questions": f"{tmp_path}/q.jsonl", "corpus": f"{tmp_path}/c.jsonl", "split": "train"},
        {"model": str(directory), "max_tokens": 64},
        {"path": f"{tool_calls.__file__}:Agent", "adapter": {"kind": "chat", "use_native_function_calling": True}},
        **{"prompts": 1, "samples": 4, "credit": "both", "reward": "recall", "final": "f1"},
    )


def test_an_agent_is_sampled_trained_and_evaluated(recipe, script, learnt, tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run")
    assert sample(recipe, run).pairs > 0
    with Store(run.store, read_only=True) as store:
        groups = list(store.groups())
    asked = {json.dumps(plain(group.state.messages)) for group in groups}
    assert all(json.loads(group.state.messages[0]["tools"]) for group in groups)
    later = [group.state.messages for group in groups if group.state.step]
    assert {"tool_calls", "tool_call_id"} <= {key for messages in later for one in messages for key in one}
    assert any(read_calls(one.completion)[1] for group in groups for one in group.samples)
    prompts = pyarrow.parquet.read_table(run.preferences / "train.parquet")["prompt"].to_pylist()
    assert {json.dumps(plain(prompt)) for prompt in prompts} <= asked
    sampled = {(tuple(prompt), ids) for prompt, ids in script}
    for form in ("sft", "kto", "grpo"):
        succeeds("store", "export", "--run", run.path, "--form", form, "--out", tmp_path / f"{form}.parquet")
        exported = pyarrow.parquet.read_table(tmp_path / f"{form}.parquet")["prompt"].to_pylist()
        assert {json.dumps(plain(prompt)) for prompt in exported} <= asked

    rows = []
    monkeypatch.setattr("leret.training.stored.sft.sft_rows", lambda encoded: rows.extend(encoded) or sft_rows(encoded))
    train(SFTRecipe(**KEYS, max_steps=1), run)
    assert rows
    assert {(tuple(one.prompt), tuple(one.completions[0])) for one in rows} <= sampled
    script.clear()
    train(GRPORecipe(**ONLINE), run)
    trained = Counter((tuple(prompt), tuple(ids)) for prompt, ids in learnt)
    assert trained.total() >= 8
    assert trained <= Counter(script)  # continuations are not trained
    with pytest.raises(TrainingError, match="remove engine: trl"):
        train(GRPOWithTRL(**KEYS, num_generations=4, name="trl"), run)
    evaluated = evaluate(EvalRecipe(split="dev", systems=("base", "grpo")), run)
    assert [row["system"] for row in evaluated.summary["rows"]] == ["base", "grpo"]
