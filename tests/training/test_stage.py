import json

import pytest
import torch
from safetensors.torch import load_file

from leret.config.training import LoraSettings
from leret.core.bundled import demo_policy
from leret.core.errors import PolicyError, RunError, TrainingError
from leret.core.runs import Run
from leret.training.algorithms.preference import DPORecipe, IPORecipe
from leret.training.algorithms.sft import SFTRecipe
from leret.training.stage import plan, train
from tests.training.training_runs import sampled_run, train_ids

KEYS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8}
SFT = SFTRecipe(num_train_epochs=2, logging_steps=1, **KEYS)
IPO = IPORecipe(init_from="sft", num_train_epochs=4, logging_steps=1, **KEYS)
DPO = DPORecipe(num_train_epochs=4, sft_weight=0.2, **KEYS)


def changed(recipe, **keys):
    return type(recipe)(**{**recipe.model_dump(), **keys})


def record(run, name):
    return json.loads((run.policies / name / "training.json").read_text())


class Shown:
    """A progress that keeps what it is told."""

    def __init__(self):
        self.started, self.done, self.facts, self.finished = [], 0, {}, 0

    def start(self, stage, total):
        self.started.append((stage, total))

    def advance(self, n=1, **facts):
        self.done += n
        self.facts |= facts

    def finish(self):
        self.finished += 1


def test_sft_then_ipo_lower_their_losses_and_leave_policies_without_pickles(run):
    shown = Shown()
    sft = train(SFT, run, progress=shown)
    # 24 states with a spread, one target each, 2 epochs of 3 batches
    assert (sft.examples, sft.steps, sft.total_steps) == (24, 6, 6)
    assert sft.loss_last < sft.loss_first
    assert shown.started == [("train sft", 6)]
    assert shown.done == 6
    assert shown.facts["loss"] == pytest.approx(sft.loss_last, rel=0.5)
    ipo = train(IPO, run)
    # adjacent pairs: two a state, 48 pairs, 4 epochs of 6 batches, on top of sft's steps
    assert (ipo.examples, ipo.steps, ipo.total_steps) == (48, 24, 30)
    assert ipo.loss_first == pytest.approx(100.0), "1 / (4 beta^2) while the policy is its own reference"
    assert ipo.loss_last < 100
    assert not list(run.policies.glob(".*"))
    for name in ("sft", "ipo"):
        files = {path.name for path in (run.policies / name).iterdir()}
        assert {
            "model.safetensors",
            "tokenizer.json",
            "config.json",
            "generation_config.json",
            "training.json",
        } <= files
        assert {"README.md", "trainer_state.json", "chat_template.jinja"} <= files
        assert not [file for file in files if file.endswith((".bin", ".pt", ".pth", ".pkl"))]
    log = record(run, "ipo")["log_history"]
    assert {"loss", "grad_norm", "rewards/margins", "rewards/accuracies", "step"} <= set(log[0])
    assert record(run, "ipo")["parent"] == "sft"
    assert run.manifest()["training"]["ipo"]["recipe"]["reduction"] == "sequence"
    assert next(event for event in run.events() if event["event"] == "done")["policy"] == "sft"


def test_what_is_trained_is_the_best_completion_under_the_zero_shot_prompt(run, base):
    train(changed(SFT, num_train_epochs=20, learning_rate=3e-3), run)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from leret.sampling.store.store import Store

    with Store(run.store, read_only=True) as store:
        group = next(iter(store.groups()))
    tokenizer = AutoTokenizer.from_pretrained(run.policies / "sft")
    model = AutoModelForCausalLM.from_pretrained(run.policies / "sft").eval()
    ids = tokenizer.apply_chat_template(
        list(group.state.messages), add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out[:-1]).strip() == group.samples[0].completion
    assert out[-1] == tokenizer.eos_token_id


def test_a_finished_policy_is_left_alone(run):
    first = train(SFT, run)
    weights = (first.path / "model.safetensors").stat().st_mtime_ns
    again = train(changed(SFT, save_steps=7, logging_steps=3), run)
    assert again.already
    assert again.steps == first.steps
    assert (first.path / "model.safetensors").stat().st_mtime_ns == weights


def test_a_finished_policy_of_another_recipe_is_refused_with_the_keys(run):
    train(SFT, run)
    with pytest.raises(RunError, match=r"learning_rate: 0\.001 in the run, 0\.002 in the recipe"):
        train(changed(SFT, learning_rate=2e-3), run)


def test_the_control_takes_as_many_steps_as_sft_and_ipo_together(run):
    train(SFT, run)
    train(IPO, run)
    more = train(changed(SFT, name="sft-more", match_steps_of="ipo"), run)
    assert more.steps == more.total_steps == 30


def test_a_control_of_nothing_is_refused(run):
    with pytest.raises(TrainingError, match=r"match_steps_of: .* has no trained policy 'ipo'"):
        train(changed(SFT, match_steps_of="ipo"), run)


def test_dpo_with_an_added_likelihood_trains_from_the_base(run):
    report = train(DPO, run)
    assert report.loss_last < report.loss_first
    assert record(run, "dpo")["parent"] == "base"


def test_the_plan_counts_without_training(run):
    told = plan(SFT, run)
    assert (told.examples, told.steps, told.done, told.resumes_at) == (24, 6, False, 0)
    assert not (run.policies / "sft").exists()
    train(SFT, run)
    assert plan(SFT, run).done


def test_lora_leaves_an_adapter_that_names_its_base_and_goes_on_from_it(run, base):
    settings = LoraSettings(r=4, alpha=8)
    sft = train(changed(SFT, lora=settings), run)
    config = json.loads((sft.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert not (sft.path / "model.safetensors").exists()
    assert sft.loss_last < sft.loss_first
    ipo = train(changed(IPO, lora=settings), run)
    assert ipo.loss_first == pytest.approx(100.0), "the reference is the adapter that it started from"
    assert ipo.loss_last < 100
    assert json.loads((ipo.path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (sft.path, ipo.path))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_full_training_from_an_adapter_merges_it(run):
    train(changed(SFT, lora=LoraSettings(r=4, alpha=8)), run)
    ipo = train(IPO, run)
    assert (ipo.path / "model.safetensors").exists()
    assert ipo.loss_first == pytest.approx(100.0)


def test_an_adapter_of_another_shape_is_refused(run):
    train(changed(SFT, lora=LoraSettings(r=4, alpha=8)), run)
    with pytest.raises(TrainingError, match=r"an adapter with r 4 and alpha 8, the recipe asks for r 2 and alpha 8"):
        train(changed(IPO, lora=LoraSettings(r=2, alpha=8)), run)


def test_examples_that_are_too_long_are_dropped_and_counted(tmp_path, base):
    run = sampled_run(tmp_path / "run", base, words=30)
    report = train(changed(SFT, max_length=24), run)
    assert report.examples + report.dropped == 24
    assert 0 < report.dropped < 24


def test_none_that_fits_is_refused(run):
    with pytest.raises(
        TrainingError, match=r"none of 24 examples fits into 4 tokens \(the shortest has \d+\); raise max_length"
    ):
        train(changed(SFT, max_length=4), run)


def test_a_run_without_spread_has_nothing_to_train_on(tmp_path, base):
    run = sampled_run(tmp_path / "run", base, spread=False)
    with pytest.raises(
        TrainingError, match=r"no target for SFT: no state whose samples differ in reward.*require_spread"
    ):
        train(SFT, run)
    with pytest.raises(TrainingError, match=r"train\.parquet holds no pair"):
        train(DPO, run)
    assert train(changed(SFT, require_spread=False), run).examples == 24


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        ({"id": train_ids(1)[0], "question": "another ?"}, r"in the training data and in the evaluation split: 'q"),
        ({"id": "other", "question": f"text of {train_ids(1)[0]}"}, r"1 questions .*have the text of .*: 'other'"),
    ],
)
def test_a_question_or_a_text_of_the_evaluation_split_is_refused(run, held_out, says):
    own = [{"id": id, "question": f"text of {id}", "split": "train"} for id in train_ids(24)]
    rows = [row for row in own if row["id"] != held_out["id"]] + [{**held_out, "split": "test"}]
    path = run.path / "questions.jsonl"
    path.write_text("".join(json.dumps({**row, "relevant_doc_ids": ["d"]}) + "\n" for row in rows))
    run.update(sampling={**run.manifest()["sampling"], "data": {"kind": "jsonl", "questions": str(path)}})
    with pytest.raises(TrainingError, match=says):
        train(SFT, run)


def test_a_question_that_the_hash_holds_out_is_refused(run):
    run.update(sampling={**run.manifest()["sampling"], "data": {"kind": "jsonl", "seed": 1}})
    with pytest.raises(TrainingError, match="evaluation split"):
        train(SFT, run)


def test_an_unknown_init_lists_what_there_is(run):
    with pytest.raises(TrainingError, match=r"init_from: 'sft' is not base, not a trained policy .*none yet"):
        train(IPO, run)


def test_a_lost_base_model_is_named(run):
    manifest = run.manifest()
    run.update(sampling={**manifest["sampling"], "policy": {"kind": "local", "model": str(run.path / "gone")}})
    with pytest.raises(PolicyError, match=r"gone is no longer there; set init_from"):
        train(SFT, run)


def test_a_base_on_a_server_needs_a_directory(run):
    run.update(sampling={**run.manifest()["sampling"], "policy": {"kind": "openai", "model": "big"}})
    with pytest.raises(
        TrainingError, match=r"sampled from 'big' on a server; training needs its weights: set init_from"
    ):
        train(SFT, run)
    assert plan(changed(SFT, init_from="demo"), run).initial == str(demo_policy().resolve())


def test_truncated_weights_are_refused(run, base, tmp_path):
    import shutil

    broken = shutil.copytree(base, tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(PolicyError, match=r"model\.safetensors is damaged or cut short"):
        train(changed(SFT, init_from=str(broken)), run)


def test_a_loss_that_is_no_number_stops_with_the_step(run):
    with pytest.raises(
        TrainingError, match=r"the (loss|grad_norm) is (nan|inf) at step \d+ of 60; lower learning_rate"
    ):
        train(changed(SFT, learning_rate=1e30, num_train_epochs=20, max_grad_norm=1e30), run)
    assert not (run.policies / "sft").exists()


@pytest.mark.parametrize("damage", ["missing", "text", "columns"])
def test_preferences_that_cannot_be_read_are_named(run, damage):
    path = run.preferences / "train.parquet"
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("not parquet")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path)
    match = {
        "missing": "is missing",
        "text": "cannot be read",
        "columns": "has no column chosen, rejected, question_id",
    }
    with pytest.raises(TrainingError, match=match[damage]) as caught:
        train(DPO, run)
    assert "leret pairs" in str(caught.value)


def test_a_run_that_was_not_sampled_says_so(tmp_path):
    with pytest.raises(RunError, match="has no sampling yet"):
        train(SFT, Run.create(tmp_path / "new"))


def test_the_split_of_a_generated_world_is_its_own(run):
    elsewhere = {"path": "gone.py:Gone"}  # so that the stored messages, which no program made, are not compared
    run.update(sampling={**run.manifest()["sampling"], "data": {"kind": "world", "seed": 0}, "program": elsewhere})
    train(SFT, run)  # hashes would hold back some ids of any world; these are none of its test questions
    made = run.manifest()["sampling"]
    run.update(sampling={**made, "data": {"kind": "jsonl", "seed": 1}})
    with pytest.raises(TrainingError, match="evaluation split"):
        train(SFT, run)


def test_a_base_that_changed_since_it_was_sampled_is_refused(run):
    run.update(rounds=[{"policy": "base", "model": "base", "digest": "f" * 32}])
    with pytest.raises(TrainingError, match=r"is no longer the one that .* was sampled from"):
        train(SFT, run)
