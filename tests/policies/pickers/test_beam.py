from __future__ import annotations

import pytest
import torch

from leret.policies.pickers.beam import plan
from tests.policies.pickers.stories import request, shaken, story

VALUES = {(): [0.6, 0.5, 0.4], (0,): [0.1, 0.2], (1,): [0.9, 0.3], (2,): [0.4, 0.4]}
"""Of the candidates that are left, by what was picked."""


def tabular(choices):
    return [torch.tensor(VALUES[tuple(int(one.id) for one in choice.picked)]) for choice in choices]


def small(n: int = 3):
    choice = story()
    return type(choice)(choice.predictor, choice.context, choice.candidates[:n], choice.picked)


@pytest.mark.parametrize(("width", "best"), [(1, ["0", "2"]), (2, ["1", "0"]), (9, ["1", "0"])])
def test_a_beam_finds_what_greedy_misses(width: int, best: list[str]) -> None:
    paths = plan(tabular, small(), 2, width)
    assert [one.id for one in paths[0].picked] == best
    assert len({frozenset(one.id for one in path.picked) for path in paths}) == len(paths) <= width


def test_beam_1_is_the_greedy_order(picker) -> None:
    one = shaken(picker())
    [path] = plan(one.score, story(), 6, 1)
    picked: list[int] = []
    while len(picked) < 6:
        [[completion]] = one.complete_many([request(story(picked), temperature=0.0)])
        picked.append(int(completion.text))
    assert [int(candidate.id) for candidate in path.picked] == picked


def test_a_beam_embeds_each_candidate_once(picker, monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = shaken(picker()), []
    own = one._function._embed_actions._embed
    monkeypatch.setattr(one._function._embed_actions, "_embed", lambda ids: read.extend(ids) or own(ids))
    plan(one.score, story(), 4, 3)
    assert len(read) == 6


@pytest.mark.parametrize(("width", "found"), [(1, [["[stop]"]]), (2, [["[stop]"], ["5", "[stop]"]])])
def test_a_path_ends_where_it_stops(width: int, found: list[list[str]]) -> None:
    def score(choices):
        return [torch.tensor([0.1, 0.9][-len(one.candidates) :]) for one in choices]

    paths = plan(score, story([0, 1, 2, 3, 4], stop=True), 2, width)
    assert [[one.id for one in path.picked] for path in paths] == found


def test_a_greedy_picker_with_a_beam_plans_to_its_budget(picker) -> None:
    one = shaken(picker(beam=4, budget=3))
    best = plan(one.score, story([2]), 2, 4)[0]
    [[completion]] = one.complete_many([request(story([2]), temperature=0.0)])
    assert completion.text == best.picked[0].id
    assert completion.value == pytest.approx(best.q_values[0], abs=1e-5)
