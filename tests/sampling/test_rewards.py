import numpy as np
import pytest

from leret.rewards.combine import GROUP_MIXERS, MIXERS, mix
from tests.sampling.conftest import sampled_by
from tests.sampling.fakes import FakePolicy, content, preferences
from tests.sampling.preferences.conftest import rows_of

PARTS = {"recall@1": 1.0, "rr": 0.5, "steps": 0.1}


def sampled(directory, policy=None, **recipe):
    return sampled_by(policy or FakePolicy(), directory, limit=8, **recipe)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_sample_keeps_its_parts_and_gets_what_the_mixer_makes_of_its_state(tmp_path, made, mixer):
    parts = PARTS if mixer != "uniform" else list(PARTS)
    run = sampled(tmp_path / "run", reward={"parts": parts, "mixer": mixer})
    scale = np.array([1.0] * 3 if mixer == "uniform" else list(PARTS.values()))
    for group in content(run):
        assert {tuple(sample.components) for sample in group.samples} == {(*PARTS, "recall", "ap")}
        matrix = np.array([[sample.components[name] for name in PARTS] for sample in group.samples])
        expected = mix(mixer, matrix, scale)
        assert [sample.reward for sample in group.samples] == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("mixer", sorted(GROUP_MIXERS))
def test_a_run_that_met_outages_ends_with_the_rewards_of_one_that_did_not(tmp_path, made, mixer):
    recipe = {"reward": {"parts": PARTS, "mixer": mixer}, "prompts": 3, "samples": 2, "max_error_rate": 1.0}
    bank = {"train_questions": 4, "dev_questions": 4, "candidates": 3, "max_demos": 1}
    whole = sampled(tmp_path / "whole", **recipe, bank=bank)
    recipe["bank"] = {"path": str(whole.prompts), "candidates": 3}
    n_asked = iter(range(10_000))
    run = sampled(tmp_path / "run", FakePolicy(fail=lambda request: next(n_asked) % 9 == 5), **recipe)
    assert any(one.failure for group in content(run) for one in group.samples)
    again = sampled(tmp_path / "run", **recipe)
    assert [group.samples for group in content(again)] == [group.samples for group in content(whole)]
    assert preferences(again) == preferences(whole)


def test_a_completion_that_does_not_parse_is_rejected_at_its_price(tmp_path, made):
    priced = sampled(tmp_path / "a", FakePolicy(junk=0.2), reward={"parts": {"ap": 1}, "unparsed_reward": -4})
    free = sampled(tmp_path / "b", FakePolicy(junk=0.2), reward="ap")
    worst = [row for row in rows_of(priced) if row["score_rejected"] == -4]
    assert worst
    assert {row["rejected"][0]["content"] for row in worst} == {""}
    assert [row for row in rows_of(priced) if row["score_rejected"] != -4] == rows_of(free)
    assert "-4" in (priced.preferences / "README.md").read_text()
    assert all(one.reward is None for group in content(priced) for one in group.samples if one.failure)


def test_final_parts_are_kept_apart_and_mixed_over_the_state(tmp_path, made):
    final = {"parts": ["recall", "rr", "steps"], "mixer": "pca"}
    run = sampled(tmp_path / "run", reward="recall@1", final=final, credit="both", final_weight=0.25)
    group = content(run)[0]
    matrix = np.array([[s.components[f"final.{name}"] for name in final["parts"]] for s in group.samples])
    finals, steps = mix("pca", matrix, np.ones(3)), [s.components["recall@1"] for s in group.samples]
    assert [s.components["final"] for s in group.samples] == pytest.approx(finals.tolist())
    expected = [0.25 * final + 0.75 * step for final, step in zip(finals, steps, strict=True)]
    assert [s.reward for s in group.samples] == pytest.approx(expected)
