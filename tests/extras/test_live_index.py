from contextlib import closing

import pytest

from leret.config.policy import EncoderSettings
from leret.core.errors import TrainingError
from leret.core.types import Choice
from leret.extras.live_index import LiveIndex, LiveJoint, LivePick
from leret.policies.load import make_policy
from leret.policies.pickers.encoder import scratch_encoder
from leret.programs.pick import candidates_of
from leret.rollouts.environment import Environment
from leret.training.stage import train
from tests.datasets.writing import json_lines
from tests.sampling.fakes import ROOT, unsampled_run
from tests.training.conftest import dialogue_run  # noqa: F401
from tests.training.picks.test_joint import JOINT
from tests.training.picks.test_picking import PICK
from tests.training.training_runs import LETTERS, Stopper, changed, fail, log, record, train_ids

VALIDATED = {"eval_steps": 3, "eval_split": "train", "eval_tasks": 8, "save_steps": 3, "max_steps": 5}
LIVE = LivePick(**PICK.model_dump() | VALIDATED, reindex_rounds=2).model_copy(update={"learning_rate": 5e-3})
KEYS = {"query_prefix": "q: ", "document_prefix": "d: ", "max_length": 7, "hidden_size": 8, "similarity": "cosine"}
TEXTS = {word: f"{word} leads to {LETTERS[i]}" for i, word in enumerate(LETTERS[1:13])}
QUESTIONS = [f"from {word}" for word in TEXTS]


@pytest.fixture
def live_run(tmp_path):
    """A run of 24 questions, not sampled, with an encoder picker among six passages of a random dense index."""
    pytest.importorskip("faiss", reason="faiss is not installed")
    json_lines(tmp_path / "c.jsonl", [{"doc_id": one, "title": one, "text": text} for one, text in TEXTS.items()])
    rows = zip(train_ids(24), QUESTIONS * 2, [*TEXTS] * 2, strict=True)
    json_lines(tmp_path / "q.jsonl", [{"id": id, "question": q, "relevant_doc_ids": [word]} for id, q, word in rows])
    scratch_encoder([*TEXTS.values()] * 2, EncoderSettings(hidden_size=8), 5).save(str(tmp_path / "model"))
    return unsampled_run(tmp_path / "live", {
        "data": {"corpus": f"{tmp_path}/c.jsonl", "questions": f"{tmp_path}/q.jsonl", "split": "train"},
        "policy": {"kind": "encoder", **KEYS},
        "retriever": {"kind": "dense", "model": f"{tmp_path}/model", "index": f"{tmp_path}/i", "k": 6, "device": "cpu"},
        "program": {"path": f"{ROOT}/pipelines/picks.py:SearchPicks", "k": 6, "budget": 1},
        "sampling": {"reward": "recall", "prompts": 1},
    })  # fmt: skip


def test_an_index_ranks_as_the_picker_that_encoded_it(live_run, tmp_path):
    with Environment.open(live_run) as environment, closing(make_policy(EncoderSettings(**KEYS))) as picker:
        index = LiveIndex(environment, tmp_path / "live")
        candidates = candidates_of(index.search(["from"], 12)[0]).items
        choices = [Choice("pick", {"question": text}, candidates) for text in QUESTIONS]
        picker.fit(choices)
        index.rankings.clear()
        first, before = index.digest, index.search(QUESTIONS, 3)
        stale = index.encode(picker)
        second, after = index.digest, index.search(QUESTIONS, 3)
        gone = [len({p.doc_id for p in old} - {p.doc_id for p in new}) for old, new in zip(before, after, strict=True)]
        assert 0 < stale == pytest.approx(sum(gone) / 36)
        for ranking, values in zip(index.search(QUESTIONS, 12), picker.score(choices), strict=True):
            scores = {passage.doc_id: passage.score for passage in ranking}
            assert [scores[one.id] for one in candidates] == pytest.approx(values.tolist(), abs=1e-5)
        index.save(tmp_path / "checkpoint")
        other = LiveIndex(environment, tmp_path / "other")
        for checkpoint, state in (("checkpoint", (second, after)), ("of a round before the first", (first, before))):
            other.load(tmp_path / checkpoint, picker)
            assert (other.digest, other.search(QUESTIONS, 3)) == state
        assert first != second


def test_a_killed_training_goes_on_with_the_index_of_its_checkpoint(live_run):
    with pytest.raises(ZeroDivisionError):
        train(LIVE, live_run, progress=Stopper(4, fail))
    resumed, straight = train(LIVE, live_run), train(changed(LIVE, name="straight"), live_run)
    assert resumed.resumed_from == 3
    assert (log(resumed), record(resumed)["weights"]) == (log(straight), record(straight)["weights"])
    assert [entry["step"] for entry in log(straight) if 0 <= entry.get("stale", -1) <= 1] == [2, 4]


def test_a_picker_trained_with_a_writer_encodes_the_index_too(live_run, dialogue_run):  # noqa: F811
    section, live = dialogue_run.section("sampling", ""), live_run.section("sampling", "")
    section |= {"retriever": {**live["retriever"], "index": None, "k": 4}, "policies": {"pick": live["policy"]}}
    dialogue_run.update(sampling=section)
    keys = JOINT.model_dump() | {"picker": {**JOINT.picker.model_dump(), "reindex_rounds": 2}, "max_steps": 2}
    recipe = LiveJoint(**keys)
    entries = log(train(recipe, dialogue_run))
    assert [entry["step"] for entry in entries if 0 <= entry.get("pick/stale", -1) <= 1] == [2]


@pytest.mark.parametrize(
    ("keys", "trains", "kinds"),
    [
        ({"policy": {"kind": "features"}}, {}, "features, dense, flat, live"),
        ({"retriever": {"kind": "bm25"}}, {}, "encoder, bm25, flat, live"),
        ({"retriever": {"kind": "dense", "model": "m", "store": "hnsw"}}, {}, "encoder, dense, hnsw, live"),
        ({}, {"states": "stored"}, "encoder, dense, flat, stored"),
    ],
)
def test_other_kinds_of_pickers_retrievers_and_states_are_refused(live_run, tmp_path, keys, trains, kinds):
    run = unsampled_run(tmp_path / "run", {**live_run.section("sampling", ""), **keys})
    with pytest.raises(TrainingError, match=f"live-index needs .* not {kinds}"):
        train(changed(LIVE, **trains), run)
