import pytest

from tests.optimize.fakes import TRAIN, Answering, Words, fake_lm, leret_of, student_of

pytestmark = pytest.mark.usefixtures("world")


def test_every_distinct_lm_is_sampled_as_it_is_set_and_trained_on_its_own_predictors(trainings):
    greedy, warm = Words("greedy"), Words("warm")
    one, two = fake_lm("greedy", greedy, temperature=0.0), fake_lm("warm", warm, temperature=0.5)
    settings = {"reward": None, "algorithms": ["sft"], "metric": lambda example, p, trace=None: len(set(p.answer))}
    best = leret_of(**settings).compile(student_of(Answering, one, answer=two), trainset=TRAIN)
    for policy, temperature in ((greedy, 1.0), (warm, 0.5)):
        assert {request.temperature for request in policy.requests} == {temperature}
    assert [best.write.lm.kwargs["temperature"], best.answer.lm.kwargs["temperature"]] == [0.0, 0.5]
    assert len(trainings) == 2
    assert best.write.lm.model != best.answer.lm.model
    for training, has_context in zip(trainings, (False, True), strict=True):
        assert {"context:" in row.prompt[-1]["content"] for row in training["examples"]} == {has_context}


def test_keys_of_a_training_are_shared_or_of_one_algorithm(trainings):
    keys = {"max_length": 128, "ipo": {"beta": 0.2}}
    leret_of(train_kwargs=keys, seed=7).compile(student_of(), trainset=TRAIN)
    assert [(t["max_length"], t.get("beta"), t["seed"]) for t in trainings] == [(128, None, 7), (128, 0.2, 7)]
