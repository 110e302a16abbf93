import math
from contextlib import closing

import pytest
import torch

from leret.core.errors import ConfigError
from leret.training.algorithms import ALGORITHMS
from leret.training.rounds.loop import RoundLoop
from leret.training.stage import train
from tests.training.picks.test_joint import JOINT
from tests.training.training_runs import changed, job_in, kill_run, log, weights_of

KILLED = JOINT


def with_keys(recipe, **sections):
    return changed(recipe, **{name: {**getattr(recipe, name).model_dump(), **keys} for name, keys in sections.items()})


def bits(report):
    return [weights_of(report.path / actor) for actor in ("picker", "writer")], log(report)


@pytest.fixture
def loop(dialogue_run):
    job = job_in(JOINT, dialogue_run)
    with closing(RoundLoop(job, ALGORITHMS["joint"].make_learner, "cpu")) as loop:
        yield loop


def test_a_pick_is_worth_the_mean_of_its_replies(loop):
    sampled = loop._sample(0)
    picks, replies = sampled.of(["pick"]), sampled.of(["reply"])
    assert len(picks.sequences) == 4 * 3
    n_distinct = len({(int(group), name) for group, (_, name) in zip(picks.groups, picks.sequences, strict=True)})
    assert len(replies.sequences) == 2 * n_distinct == sampled.metrics["num_samples"]
    means = replies.rewards.reshape(-1, 2).mean(1)
    firsts = list(dict.fromkeys((int(g), name) for g, (_, name) in zip(picks.groups, picks.sequences, strict=True)))
    worth = dict(zip(firsts, means.tolist(), strict=True))
    for group, (_, name), reward in zip(picks.groups.tolist(), picks.sequences, picks.rewards, strict=True):
        assert float(reward) == pytest.approx(worth[group, name])
    assert replies.groups.tolist() == [i // 2 for i in range(2 * n_distinct)]
    assert max(replies.walks) == max(picks.walks) == 3


def test_the_first_update_has_ratio_one_for_both_actors(dialogue_run):
    entries = log(train(JOINT, dialogue_run))
    assert "pick/val/ratio" not in entries[0]  # a picker from scratch has no weights yet
    assert entries[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert entries[1]["pick/val/ratio"] == pytest.approx(1, abs=1e-5)
    assert {"pick/reward", "pick/learning_rate", "pick/grad_norm", "completions/length_ratio"} <= entries[1].keys()


def test_picks_are_drawn_with_the_probabilities_that_the_ratio_starts_from(loop):
    loop.learner.learn(loop._sample(0), 0)
    number_of = {}
    for number in range(1, 30):
        for choice, name in loop._sample(number).of(["pick"]).sequences:
            place = [one.id for one in choice.candidates].index(name)
            number_of[place] = number_of.get(place, 0) + 1
    n = sum(number_of.values())
    with torch.no_grad():
        picker = loop.learner.picker.policy
        shares = torch.stack(
            [(q / 1.0).softmax(0) for q in picker.q([c for c, _ in loop._sample(1).of(["pick"]).sequences])]
        )
    assert number_of[0] / n == pytest.approx(float(shares.mean(0)[0]), abs=4 * math.sqrt(0.25 / n))


def test_a_large_beta_holds_the_picker(dialogue_run):
    kl = {}
    for beta in (1e-6, 10.0):  # 0 would log no KL
        recipe = with_keys(JOINT, picker={"beta": beta}, writer={"learning_rate": 3e-3})
        entries = log(train(changed(recipe, name=f"beta{beta:g}", max_steps=8), dialogue_run))
        kl[beta] = max(entry["pick/kl"] for entry in entries[-3:])
    assert kl[10.0] < 0.3 * kl[1e-6]


def test_a_killed_training_ends_in_the_same_bits(dialogue_run):
    kill_run(dialogue_run, "tests.training.picks.test_joint_learner", "KILLED", 3)
    resumed = train(KILLED, dialogue_run)
    assert resumed.resumed_from == 2
    assert bits(resumed) == bits(train(changed(KILLED, name="straight"), dialogue_run))


def test_a_program_without_a_writer_after_the_pick_is_refused(dialogue_run):
    recipe = job_in(JOINT, dialogue_run).recipe
    only = recipe.writer.model_copy(update={"predictors": ("nothing",)})
    job = job_in(recipe.model_copy(update={"writer": only, "predictors": ("pick",)}), dialogue_run)
    with (
        closing(RoundLoop(job, ALGORITHMS["joint"].make_learner, "cpu")) as loop,
        pytest.raises(ConfigError, match="writes after a pick"),
    ):
        loop._sample(0)
