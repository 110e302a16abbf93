from contextlib import closing

import pytest

from leret.config.policy import EncoderSettings
from leret.config.sampling import SamplingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Choice
from leret.policies.load import make_policy
from leret.policies.pickers.encoder import scratch_encoder
from leret.programs.pick import candidates_of
from leret.rollouts.environment import Environment
from leret.training.online.live import LiveIndex
from leret.training.stage import train
from tests.datasets.writing import json_lines
from tests.sampling.fakes import ROOT
from tests.training.algorithms.test_joint import JOINT
from tests.training.online.test_picking import PICK
from tests.training.training_runs import LETTERS, Stopper, changed, fail, log, record, train_ids

VALIDATED = {"eval_steps": 3, "eval_split": "train", "eval_tasks": 8, "save_steps": 3, "max_steps": 5}
LIVE = changed(PICK, **VALIDATED, reindex_rounds=2, learning_rate=5e-3)
KEYS = {"query_prefix": "q: ", "document_prefix": "d: ", "max_length": 7, "hidden_size": 8, "similarity": "cosine"}
TEXTS = {word: f"{word} leads to {LETTERS[i]}" for i, word in enumerate(LETTERS[1:13])}


@pytest.fixture
def run(tmp_path):
    """A run of 24 questions, not sampled, with an encoder picker among six passages of a random dense index."""
    pytest.importorskip("faiss", reason="faiss is not installed")
    json_lines(tmp_path / "c.jsonl", [{"doc_id": one, "title": one, "text": text} for one, text in TEXTS.items()])
    words = zip(train_ids(24), [*TEXTS] * 2, strict=True)
    json_lines(tmp_path / "q.jsonl", [{"id": i, "question": f"from {w}", "relevant_doc_ids": [w]} for i, w in words])
    scratch_encoder([*TEXTS.values()] * 2, EncoderSettings(hidden_size=8), 5).save(str(tmp_path / "model"))
    recipe = {
        "data": {"corpus": f"{tmp_path}/c.jsonl", "questions": f"{tmp_path}/q.jsonl", "split": "train"},
        "policy": {"kind": "encoder", **KEYS},
        "retriever": {"kind": "dense", "model": f"{tmp_path}/model", "index": f"{tmp_path}/i", "k": 6, "device": "cpu"},
        "program": {"path": f"{ROOT}/pipelines/picks.py:SearchPicks", "k": 6, "budget": 1},
        "sampling": {"reward": "recall", "prompts": 1},
    }
    made = Run.create(tmp_path / "live")
    made.update(sampling=SamplingRecipe.model_validate(recipe).model_dump(mode="json"))
    made.held_out.write_text("[]")
    return made


def test_an_index_ranks_as_the_picker_that_encoded_it(run, tmp_path):
    questions = [f"from {word}" for word in TEXTS]
    with Environment.open(run) as environment, closing(make_policy(EncoderSettings(**KEYS))) as picker:
        index = LiveIndex(environment, tmp_path / "live")
        passages = index.search(["from"], 12)[0]
        choices = [Choice("pick", {"question": text}, candidates_of(passages).items) for text in questions]
        picker.fit(choices)
        index.found.clear()
        first, before = index.digest, index.search(questions, 3)
        stale = index.encode(picker)
        whole, after = index.search(questions, 12), index.search(questions, 3)
        for choice, ranking, values in zip(choices, whole, picker.score(choices), strict=True):
            scores = {passage.doc_id: passage.score for passage in ranking}
            assert [scores[one.id] for one in choice.candidates] == pytest.approx(values.tolist(), abs=1e-5)
        gone = [len({p.doc_id for p in old} - {p.doc_id for p in new}) for old, new in zip(before, after, strict=True)]
        assert stale == pytest.approx(sum(gone) / 36)
        assert stale > 0
        assert index.digest != first
        index.save(tmp_path / "checkpoint")
        again = LiveIndex(environment, tmp_path / "again")
        again.load(tmp_path / "checkpoint", picker)
        assert (again.digest, again.search(questions, 3)) == (index.digest, after)
        again.load(tmp_path / "no checkpoint", picker)  # one of a round before the first encoding
        assert (again.digest, again.search(questions, 3)) == (first, before)


def test_a_killed_training_goes_on_with_the_index_of_its_checkpoint(run):
    with pytest.raises(ZeroDivisionError):
        train(LIVE, run, progress=Stopper(4, fail))
    resumed = train(LIVE, run)
    assert resumed.resumed_from == 3
    straight = train(changed(LIVE, name="straight"), run)
    assert log(resumed) == log(straight)
    assert record(resumed)["weights"] == record(straight)["weights"]
    assert [entry["step"] for entry in log(straight) if 0 <= entry.get("stale", -1) <= 1] == [2, 4]
    fixed = train(changed(LIVE, name="fixed", reindex_rounds=None), run)
    eval_recall = [[entry["eval_recall"] for entry in log(one) if "eval_recall" in entry] for one in (straight, fixed)]
    assert eval_recall[0][0] == eval_recall[1][0]
    assert eval_recall[0] != eval_recall[1]
    assert not list(run.path.rglob("index-encoders"))


def test_a_picker_trained_with_a_writer_encodes_the_index_too(run, dialogue_run):
    section, live = dialogue_run.section("sampling", ""), run.section("sampling", "")
    section |= {"retriever": {**live["retriever"], "k": 4}, "policies": {"pick": live["policy"]}}
    dialogue_run.update(sampling=SamplingRecipe.model_validate(section).model_dump(mode="json"))
    recipe = changed(JOINT, picker={**JOINT.picker.model_dump(), "reindex_rounds": 2}, max_steps=2)
    entries = log(train(recipe, dialogue_run))
    assert [entry["step"] for entry in entries if 0 <= entry.get("pick/stale", -1) <= 1] == [2]


@pytest.mark.parametrize(
    ("keys", "trains", "says"),
    [
        ({"policy": {"kind": "features"}}, {}, "not features, dense, flat, live"),
        ({"retriever": {"kind": "bm25"}}, {}, "not encoder, bm25, flat, live"),
        ({"retriever": {"kind": "dense", "model": "m", "store": "hnsw"}}, {}, "not encoder, dense, hnsw, live"),
        ({}, {"states": "stored"}, "not encoder, dense, flat, stored"),
    ],
)
def test_another_kind_of_picker_retriever_or_state_is_refused(run, keys, trains, says):
    run.update(sampling=SamplingRecipe.model_validate({**run.section("sampling", ""), **keys}).model_dump(mode="json"))
    with pytest.raises(TrainingError, match=f"reindex_rounds needs.*{says}"):
        train(changed(LIVE, **trains), run)
