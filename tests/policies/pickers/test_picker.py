import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from leret.config.policy import EncoderSettings, FeaturesSettings, PolicySettings
from leret.core.errors import PolicyError
from leret.policies.checkpoints import PICKER_RECORD, policy_digest
from leret.policies.load import make_policy
from leret.policies.pickers.picker import draw, plan
from tests.policies.pickers.stories import numbers, request, shaken, story

KINDS = ("features", "encoder")
VALUES = torch.tensor([0.1, 0.5, 0.5, -0.2])
CODE = {"features": {"features": f"{numbers.__module__}:numbers"}, "encoder": {}}  # a recipe names its code itself


@pytest.mark.parametrize(
    ("top_k", "top_p", "probabilities"),
    [
        (None, 1.0, [0.2117, 0.3158, 0.3158, 0.1568]),
        (2, 1.0, [0, 0.5, 0.5, 0]),
        (9, 0.5, [0, 0.5, 0.5, 0]),
        (3, 0.3, [0, 1, 0, 0]),
    ],
)
def test_draws_follow_softmax_of_the_values(top_k, top_p, probabilities):
    drawn = np.array(draw(VALUES, range(20_000), 1.0, top_k, top_p))
    places = drawn[:, 0].astype(int)
    np.testing.assert_allclose(np.bincount(places, minlength=4) / 20_000, probabilities, atol=0.011)
    np.testing.assert_allclose(np.exp(drawn[:, 1]), np.array(probabilities)[places], atol=1e-3)
    assert draw(VALUES, [1, 2], 0.0, top_k, top_p) == [(1, 0.0), (1, 0.0)]  # the first of the best


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_depends_on_its_seed_and_has_id_value_and_log_probability(picker, kind):
    one = shaken(picker(kind))
    requests = [request(story(), 1, 2, 3), request(story([2]), 4), request(story([0, 4], stop=True), 5, 6)]
    together = one.complete_many(requests)
    alone = [one.complete_many([request(r.choice, seed)])[0][0] for r in requests for seed in r.seeds]
    assert [c.text for each in together for c in each] == [c.text for c in alone]

    async def complete():
        return await asyncio.gather(*map(one.complete, requests))

    assert [[c.text for c in each] for each in asyncio.run(complete())] == [[c.text for c in each] for each in together]
    choice = story([1])
    [values] = one.score([choice])
    for completion in one.complete_many([request(choice, *range(8), temperature=0.3)])[0]:
        place = [candidate.id for candidate in choice.candidates].index(completion.text)
        assert completion.value == pytest.approx(values[place].item())
        assert completion.logprobs == pytest.approx([torch.log_softmax(values / 0.3, 0)[place].item()], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_values_for_updates_equal_those_of_draws(picker, kind):
    one, choices = shaken(picker(kind)), [story(), story([2]), story([2, 0], stop=True)]
    scores = one.score(choices)
    for q, twin, score in zip(one.q(choices), one.q(choices, twin=True), scores, strict=True):
        torch.testing.assert_close(q, score, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(twin.mean(0), score, atol=1e-5, rtol=1e-5)
        assert q.requires_grad
        assert not score.requires_grad
        assert (twin[0] - twin[1]).abs().max() > 1e-3
    for twin in (False, True):
        for whole, at, place in zip(one.q(choices, twin), one.q(choices, twin, at=[5, 0, 4]), [5, 0, 4], strict=True):
            torch.testing.assert_close(at, whole[..., place : place + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_values_and_changed_files_are_refused(picker, kind, tmp_path):
    one = shaken(picker(kind, hidden_size=16))
    one.save(tmp_path / "p")

    def load():
        return make_policy(PolicySettings.model_validate({"kind": kind, "model": str(tmp_path / "p"), **CODE[kind]}))

    saved, clone, before = load(), one.clone(), one.score([story([2])])
    assert (saved.name, saved.fitted, saved.digest == load().digest) == ("p", True, True)
    shaken(one, 1).save(tmp_path / "p")
    for copied in (saved, clone):
        torch.testing.assert_close(copied.score([story([2])]), before)
    assert not torch.allclose(one.score([story([2])])[0], before[0])
    assert saved.digest != load().digest
    (tmp_path / "p/training.json").write_text(json.dumps({"weights": policy_digest(tmp_path / "p")}))
    assert load().fitted
    next(one.model.parameters()).data.view(-1)[:1] = torch.nan
    one.save(tmp_path / "p")
    with pytest.raises(PolicyError, match="changed since training"):
        load()
    (tmp_path / "p/training.json").unlink()
    with pytest.raises(PolicyError, match="NaN or infinite"):
        load()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_network_all_candidates_are_equal(kind):
    untrained = make_policy(PolicySettings.model_validate({"kind": kind, **CODE[kind]}))
    [greedy] = untrained.complete_many([request(story(), temperature=0.0)])
    assert greedy[0].text == "0"
    with pytest.raises(PolicyError, match="call fit"):
        untrained.q([story()])


def test_a_picker_of_another_kind_or_version_is_refused(picker, tmp_path):
    picker("features").save(tmp_path / "p")
    with pytest.raises(PolicyError, match="kind features"):
        make_policy(EncoderSettings(model=str(tmp_path / "p")))
    with pytest.raises(PolicyError, match="has no picker"):
        make_policy(FeaturesSettings(model=str(tmp_path)))
    record = json.loads((tmp_path / "p" / PICKER_RECORD).read_text())
    (tmp_path / "p" / PICKER_RECORD).write_text(json.dumps({**record, "version": 1}))
    with pytest.raises(PolicyError, match="different version of leret"):
        make_policy(FeaturesSettings(model=str(tmp_path / "p")))


AFTER = {(): [0.6, 0.5, 0.4], (0,): [0.1, 0.2], (1,): [0.9, 0.3], (2,): [0.4, 0.4]}


def tabular(choices):
    return [torch.tensor(AFTER[tuple(int(one.id) for one in choice.picked)]) for choice in choices]


@pytest.mark.parametrize(("width", "best"), [(1, ["0", "2"]), (2, ["1", "0"]), (9, ["1", "0"])])
def test_a_beam_finds_what_greedy_misses(width, best):
    choice = replace(story(), candidates=story().candidates[:3])
    paths = plan(tabular, choice, 2, width)
    assert [one.id for one in paths[0].picked] == best
    assert len({frozenset(one.id for one in path.picked) for path in paths}) == len(paths) <= width


def test_a_path_ends_at_its_stop():
    def score(choices):
        return [torch.tensor([0.1, 0.9][-len(one.candidates) :]) for one in choices]

    paths = plan(score, story([0, 1, 2, 3, 4], stop=True), 2, 2)
    assert [[one.id for one in path.picked] for path in paths] == [["[stop]"], ["5", "[stop]"]]


def test_a_greedy_picker_with_a_beam_plans_to_its_budget(picker):
    one = shaken(picker(beam=4, budget=3))
    best = plan(one.score, story([2]), 2, 4)[0]
    [[completion]] = one.complete_many([request(story([2]), temperature=0.0)])
    assert completion.text == best.picked[0].id
    assert completion.value == pytest.approx(best.q_values[0], abs=1e-5)
