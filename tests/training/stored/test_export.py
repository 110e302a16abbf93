import asyncio
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pyarrow.parquet
import pytest

from leret.core.runs import Run
from leret.core.types import seed_of
from leret.policies.checkpoints import policy_directory
from leret.programs.prompts import Prompt
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import train
from leret.training.stored.export import GRPO_COLUMNS, RL_COLUMNS, grpo_rows, rl_rows
from tests.first_steps import read_lines, refused, succeeds
from tests.sampling.fakes import ROOT
from tests.training.training_runs import log, world_recipe

PAGE = (ROOT / "docs/how-to/trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MULTIHOP = f"{ROOT}/pipelines/multihop.py:MultiHop"
N = 4


def sampled(directory, limit, **sampling):
    run = Run.create(directory)
    sample(world_recipe(MULTIHOP, limit=limit, samples=N, token_ids=True, **sampling), run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the samples that the first round of a training draws."""
    return sampled(tmp_path_factory.mktemp("rl") / "run", 5, seed=seed_of(0, "round", 0))


@pytest.fixture(scope="module")
def rows(run):
    succeeds("store", "export", "--run", run.path, "--form", "rl", "--out", run.path.parent / "rl.parquet")
    succeeds("store", "export", "--run", run.path, "--form", "grpo", "--out", run.path.parent / "states.parquet")
    table = pyarrow.parquet.read_table(run.path.parent / "rl.parquet")
    assert table.column_names == list(RL_COLUMNS)
    return table.to_pylist()


def test_rows_and_states_have_the_stored_values_of_their_samples(run, rows):
    with Store(run.store, read_only=True) as store:
        samples = {one.id: one for group in store.groups() for one in group.samples}
    for row in rows:
        one = samples[row["sample"]]
        stored = [one.task_id, list(one.token_ids), list(one.logprobs), one.reward, one.seed, dict(one.components)]
        names = ("question_id", "completion_ids", "logprobs", "reward", "seed")
        assert [*(row[name] for name in names), json.loads(row["parts"])] == stored
        assert (row["group"], row["temperature"]) == (f"{one.state_id}-{one.step}-0", 1.0)
        assert len(row["prompt_ids"]) == one.n_prompt_tokens
    assert set(Counter(row["group"] for row in rows).values()) == {N}
    assert {row["policy_digest"] for row in rows} == {run.manifest.policy_digest}
    states = list(grpo_rows(run))
    assert list(states[0]) == list(GRPO_COLUMNS)
    assert {f"{one['state']}-{one['step']}-0" for one in states} == {row["group"] for row in rows}
    assert all(one["relevant_doc_ids"] and json.loads(one["inputs"])["question"] for one in states)


def test_each_prompt_of_the_bank_forms_a_group_and_what_saw_a_hint_is_left_out(tmp_path):
    (tmp_path / "bank").mkdir()
    demo = {"question": "Who directed the film?", "context": [], "query": "film"}
    few_shot = Prompt("1", {"write_query": [demo]})
    few_shot.save(tmp_path / "bank" / "1.json")
    run = sampled(tmp_path / "run", 2, prompts=2, bank={"path": f"{tmp_path}/bank"})
    rows = [row for row in rl_rows(run) if row["group"].endswith("-1")]
    assert sum(row["advantage"] for row in rows[:N]) == pytest.approx(0, abs=1e-9)
    replace(few_shot, hint="gold").save(run.prompts / "1.json")
    assert {row["group"].rpartition("-")[2] for row in rl_rows(run)} == {"0"}


def test_a_run_without_token_ids_or_without_its_tokenizer_says_what_to_do(run, rows, tmp_path, original):
    out = tmp_path / "rl.jsonl"

    def export(run, form, *options):
        return "store", "export", "--run", run.path, "--out", out, "--form", form, *options

    assert "--set sampling.token_ids=true" in refused(*export(original, "rl"))
    assert "--tokenizer" in refused(*export(run, "sft", "--tokenizer", tmp_path))
    english = policy_directory("leret-english-6m")
    assert "the sampler counted" in refused(*export(run, "rl", "--tokenizer", english))
    section = run.manifest.sampling
    served = {"kind": "openai", "model": "served", "urls": ["http://127.0.0.1:1/v1"]}
    run.update(sampling={**section, "policy": {**section["policy"], **served}})
    try:
        assert "add --tokenizer DIR" in refused(*export(run, "rl"))
        assert not out.exists()
        succeeds(*export(run, "rl", "--tokenizer", policy_directory("demo")))
        assert read_lines(out) == rows
    finally:
        run.update(sampling=section)


def block(start):
    return next(one for one in BLOCKS if one.startswith(start))


def test_trl_computes_the_loss_of_the_first_update_and_trains_on_the_states(run, rows, tmp_path, monkeypatch):
    for path in run.path.parent.glob("*.parquet"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/rl").symlink_to(run.path)
    monkeypatch.chdir(tmp_path)
    keys = {"num_generations": N, "max_steps": 1, "per_device_train_batch_size": len(rows), "use_cpu": True}
    keys |= {"bf16": False, "report_to": [], "logging_steps": 1, "save_strategy": "no", "max_completion_length": 12}
    values = f"policy, keys = {str(policy_directory('demo'))!r}, {keys!r}"
    code, n = re.subn(r"^policy, keys = .*$", lambda _: values, block("from datasets"), flags=re.MULTILINE)
    assert n == 1
    names = {}
    exec(compile(code, "trl", "exec"), names)  # trains on the stored tokens
    [entry, _] = names["trainer"].state.log_history
    recipe = GRPORecipe(num_generations=N, questions_per_round=5, max_steps=1, logging_steps=1, device="cpu")
    [ours] = log(train(recipe, run))
    assert abs(ours["loss"]) > 1e-3
    for name in ("loss", "grad_norm", "reward"):
        assert entry[name] == pytest.approx(ours[name], abs=1e-5)
    exec(compile(block("from pathlib"), "states", "exec"), names)
    assert 0 < names["trainer"].state.log_history[0]["rewards/recall/mean"] <= 1


def provide(monkeypatch, name, **members):
    """Provide a module, and its packages, as if they were installed."""
    for place in [name[: end.start()] for end in re.finditer(r"\.|$", name)]:
        monkeypatch.setitem(sys.modules, place, ModuleType(place))
    vars(sys.modules[name]).update(members)


def test_the_records_of_prime_rl_and_skyrl_have_their_fields(rows, monkeypatch):
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    provide(monkeypatch, "prime_rl.transports.batch.types", TrainingSample=SimpleNamespace)
    provide(monkeypatch, "skyrl.train.generators.base", GeneratorInterface=object)
    names = {"groups": groups}
    for start in ("from prime_rl", "from skyrl"):
        exec(compile(block(start), start, "exec"), names)
    made = names["training_sample"](rows[0])
    n, m = len(rows[0]["prompt_ids"]), len(rows[0]["completion_ids"])
    assert {len(values) for values in vars(made).values() if values != "leret"} == {n + m}
    assert (made.mask[n:], made.logprobs[n:]) == ([True] * m, rows[0]["logprobs"])
    assert made.advantages[n:] == [rows[0]["advantage"]] * m
    state, step, _ = rows[0]["group"].split("-")
    places = [SimpleNamespace(instance_id="0", repetition_id=i) for i in range(N)]
    asked = {"env_extras": [{"state": state, "step": int(step)}] * N, "trajectory_ids": places}
    output = asyncio.run(names["StoredSamples"]().generate(asked))
    assert output["response_ids"] == [row["completion_ids"] for row in rows[:N]]
    assert output["rewards"] == [row["reward"] for row in rows[:N]]
    assert {"prompt_token_ids", "loss_masks", "rollout_logprobs", "stop_reasons", "rollout_metrics"} <= output.keys()
