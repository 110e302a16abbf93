import json
import math
from dataclasses import replace

import numpy as np
import pytest

from leret.config.policy import EncoderSettings
from leret.config.retriever import DenseSettings
from leret.core.errors import PolicyError
from leret.core.types import Candidate, Choice, Document
from leret.datasets.corpus import Corpus
from leret.policies.load import make_policy
from leret.policies.pickers.encoder import positions_of
from leret.retrieval.load import load_retriever, open_index
from tests.policies.pickers.stories import STORY, shaken, story
from tests.retrieval.small import minilm


def turned(vector, position):
    d, out = len(vector), np.zeros(len(vector))
    for i in range(d // 2):
        turn = 2 * (i % (d // 4)) + i // (d // 4)
        angle = position * math.exp(-math.log(1000) * turn / (d // 2))
        x, y = vector[i], vector[i + d // 2]
        out[[i, i + d // 2]] = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    return out


def placed(places, picked):
    candidates, before = ([Candidate(f"{i}", "", "", i) for i in values] for values in (places, picked))
    return Choice("pick", {}, candidates, tuple(before))


def test_relative_positions_are_places_between_picked_chunks():
    choices = [
        placed([0, 2, 3, 5, 6, 9, None], [7, 4]),
        placed([2, 1, 0], []),
        placed([None], [None]),
        placed([0], [3]),
    ]
    first = [9 * 1 / 5, 9 * 3 / 5, 9 * 4 / 5, 10 + 9 * 1 / 3, 10 + 9 * 2 / 3, 20 + 9 * 2 / 3, 0]
    np.testing.assert_allclose(positions_of(choices, "relative"), [*first, 6.75, 4.5, 2.25, 0, 2.25], atol=1e-5)
    np.testing.assert_allclose(positions_of(choices, "absolute"), [0, 2, 3, 5, 6, 9, 0, 2, 1, 0, 0, 0])


@pytest.mark.parametrize(("positions", "at"), [("absolute", [0, 3, 5]), ("relative", [4.5, 13.6, 17.2])])
def test_q_values_equal_an_oracle_on_the_saved_encoders(picker, tmp_path, positions, at):
    from sentence_transformers import SentenceTransformer

    shaken(one := picker(positions=positions)).save(tmp_path)
    state, action = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("state", "action"))
    s = state.encode(f"Where is the milk? [SEP] {STORY[1]}").astype(float)
    a = action.encode([STORY[i] for i in (0, 3, 5)]).astype(float)
    choice = story([1])
    choice = Choice("pick", choice.context, [choice.candidates[i] for i in (0, 2, 4)], choice.picked)
    expected = [s @ turned(vector, p) / 8 for vector, p in zip(a, at, strict=True)]
    np.testing.assert_allclose(one.score([choice])[0], expected, atol=1e-6)


def test_texts_have_prefixes_titles_and_picks(picker):
    state = picker(order="pick")._function._state(story([4, 1], question="q"), " [SEP] ")
    assert state == f"q [SEP] {STORY[4]} [SEP] {STORY[1]}"
    function = picker(query_prefix="query: ", document_prefix="passage: ")._function
    assert function._state(story([4, 1], question="q"), "|") == f"query: q|{STORY[1]}|{STORY[4]}"
    titled = [Candidate("a", "It is old.", "Rome"), *story(stop=True).candidates[-2:]]
    texts = ["passage: Rome. It is old.", f"passage: {STORY[5]}", "passage: [stop]"]
    assert function._actions([Choice("pick", {}, titled)]) == texts


def test_a_saved_encoder_is_a_dense_index_model(picker, tmp_path):
    pytest.importorskip("faiss", reason="faiss is not installed")
    shaken(one := picker(positions="none")).save(tmp_path / "p")
    choice = story()
    corpus = Corpus(Document(candidate.id, "Mary", candidate.text) for candidate in choice.candidates)
    titled = Choice("pick", choice.context, [candidate._replace(title="Mary") for candidate in choice.candidates])
    models = {"model": str(tmp_path / "p" / "action"), "query_model": str(tmp_path / "p" / "state")}
    load_retriever(DenseSettings(**models, normalize=False, index=str(tmp_path / "index")), corpus, tmp_path)
    [ranking] = open_index(tmp_path / "index").search([choice.context["question"]], 6)
    values = one.score([titled])[0] * math.sqrt(one.model["state"].get_embedding_dimension())
    scores = {passage.doc_id: passage.score for passage in ranking}
    assert scores == pytest.approx({str(i): value for i, value in enumerate(values.tolist())}, abs=1e-4)


def ranked(*scores, **more):
    candidates = [one._replace(data={"score": score}) for one, score in zip(story().candidates, scores, strict=True)]
    return replace(story(**more), candidates=(*candidates, *story(**more).candidates[6:]))


def test_cosine_and_the_retriever_scores_add_up(picker, tmp_path):
    from sentence_transformers import SentenceTransformer

    shaken(one := picker(similarity="cosine", score_weight=0.5, positions="none")).save(tmp_path)
    state, action = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("state", "action"))
    cosines = action.encode([*STORY, "[stop]"]) @ state.encode("Where is the milk?")
    choices = [ranked(4.0, 0, 0, 0, 0, 2.0, stop=True), ranked(1, 1, 1, 1, 1, 1)]
    first = 0.5 * np.array([3, -1, -1, -1, -1, 1, 0]) / math.sqrt(14 / 6)
    np.testing.assert_allclose(one.score(choices)[0], cosines + first, atol=1e-5)
    np.testing.assert_allclose(one.score(choices)[1], cosines[:6], atol=1e-5)
    again = make_policy(EncoderSettings(model=str(tmp_path)))
    assert again.settings.similarity == "cosine"
    for policy in (one, again):
        np.testing.assert_allclose(policy.q(choices, at=[5, 2])[0].detach(), [cosines[5] + first[5]], atol=1e-5)
    with pytest.raises(PolicyError, match=r"score_weight: a candidate of pick has no number data\['score'\]"):
        one.score([story()])


def test_a_saved_architecture_overrides_the_recipe(picker, tmp_path):
    shaken(one := picker(positions="absolute")).save(tmp_path)
    record = json.loads((tmp_path / "picker.json").read_text())
    del record["settings"]["similarity"], record["settings"]["score_weight"]  # as an older leret saved it
    (tmp_path / "picker.json").write_text(json.dumps(record))
    again = make_policy(EncoderSettings(model=str(tmp_path), positions="none", top_k=3))
    assert (again.settings.positions, again.settings.top_k) == ("absolute", 3)
    np.testing.assert_array_equal(again.score([story()])[0], one.score([story()])[0])


def test_a_pretrained_encoder_loses_its_normalization(picker):
    one = picker(positions="none", model=str(minilm()))
    assert one.fitted
    assert [type(part).__name__ for part in one.model["state"]] == ["Transformer", "Pooling"]
    assert one.digest != make_policy(EncoderSettings(model=str(minilm()), query_prefix="query: ")).digest
    with pytest.raises(PolicyError, match="model directory nowhere does not exist"):
        make_policy(EncoderSettings(model="nowhere"))
