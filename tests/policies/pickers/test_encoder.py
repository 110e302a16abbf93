from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from leret.core.types import Candidate, Choice
from leret.policies.pickers import encoder as encoders
from leret.policies.pickers.encoder import EmbeddingCache
from leret.policies.pickers.positions import relative_positions, rotated_products
from tests.policies.pickers.stories import STORY, shaken, story


def turned(vector: np.ndarray, position: float) -> np.ndarray:
    """A vector whose pairs of dimensions are turned by a position, one after the other."""
    d, out = len(vector), np.zeros(len(vector))
    for k in range(d // 2):
        angle = position * math.exp(-math.log(1000) * k / (d // 2))
        x, y = vector[2 * k], vector[2 * k + 1]
        out[2 * k : 2 * k + 2] = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    return out


def test_products_are_those_of_turned_vectors() -> None:
    generator = np.random.default_rng(0)
    states, actions = generator.normal(size=(2, 5, 8))
    positions = generator.uniform(0, 30, 5)
    found = rotated_products(torch.from_numpy(states), torch.from_numpy(actions), torch.from_numpy(positions))
    expected = [s @ turned(a, p) / math.sqrt(8) for s, a, p in zip(states, actions, positions, strict=True)]
    np.testing.assert_allclose(found.mean(0), expected, atol=1e-6)


def test_relative_positions_are_places_between_picked_chunks() -> None:
    places = np.array([0, 2, 3, 5, 6, 9, np.nan])
    expected = [9 * 1 / 5, 9 * 3 / 5, 9 * 4 / 5, 10 + 9 * 1 / 3, 10 + 9 * 2 / 3, 20 + 9 * 2 / 3, 0]
    np.testing.assert_allclose(relative_positions(places, np.array([7.0, 4.0])), expected, atol=1e-5)
    np.testing.assert_allclose(relative_positions(np.arange(3.0), np.array([])), [2.25, 4.5, 6.75])


@pytest.mark.parametrize(
    ("positions", "at"), [("none", [0, 0, 0]), ("absolute", [0, 3, 5]), ("relative", [4.5, 13.6, 17.2])]
)
def test_q_values_equal_an_oracle_on_the_saved_encoders(
    picker, tmp_path: Path, positions: str, at: list[float]
) -> None:
    from sentence_transformers import SentenceTransformer

    shaken(one := picker(positions=positions)).save(tmp_path)
    state, action = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("state", "action"))
    s = state.encode(f"Where is the milk? [SEP] {STORY[1]}").astype(float)
    a = action.encode([STORY[i] for i in (0, 3, 5)]).astype(float)
    choice = story([1])
    choice = Choice("pick", choice.context, [choice.candidates[i] for i in (0, 2, 4)], choice.picked)
    expected = [s @ turned(own, p) / 8 for own, p in zip(a, at, strict=True)]
    np.testing.assert_allclose(one.score([choice])[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "text"),
    [("document", f"q [SEP] {STORY[1]} [SEP] {STORY[4]}"), ("pick", f"q [SEP] {STORY[4]} [SEP] {STORY[1]}")],
)
def test_a_state_is_the_question_and_what_was_picked(picker, order: str, text: str) -> None:
    one = picker(order=order)
    assert one._function._state(story([4, 1], question="q"), " [SEP] ") == text


def test_prefixes_and_titles_are_part_of_the_texts(picker) -> None:
    function = picker(query_prefix="query: ", document_prefix="passage: ")._function
    assert function._state(story(question="q"), "|") == "query: q"
    titled = [Candidate("a", "It is old.", "Rome"), *story(stop=True).candidates[-2:]]
    assert function._actions(titled) == ["passage: Rome. It is old.", f"passage: {STORY[5]}", "passage: [stop]"]


def test_a_text_is_embedded_once_until_the_weights_change(picker, monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = shaken(picker()), []
    monkeypatch.setattr(
        one._function,
        "_read_action",
        lambda texts, own=one._function._read_action: read.append(len(texts)) or own(texts),
    )
    before = one.score([story(), story([2])])
    one.score([story([2, 3], stop=True)])
    assert read == [6, 1]
    shaken(one, 1)
    assert not torch.allclose(one.score([story()])[0], before[0])
    assert read == [6, 1, 6]


def test_the_cache_of_embeddings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    cache = EmbeddingCache(lambda texts: asked.extend(texts) or torch.tensor([[float(len(text))] for text in texts]))
    cache.rows([["a", "bb"], ["bb", "ccc"]])
    monkeypatch.setattr(encoders, "_CACHE_BYTES", 8)
    [rows] = cache.rows([["ccc", "dddd"]])
    assert asked == ["a", "bb", "ccc", "ccc", "dddd"]
    assert cache.embeddings[rows].flatten().tolist() == [3.0, 4.0]


def test_a_long_list_equals_the_same_candidates_in_parts(picker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_ROWS", 4)
    one = shaken(picker())
    torch.testing.assert_close(one.score([story(), story([2])]), [q.detach() for q in one.q([story(), story([2])])])
