import pytest

import leret
from leret.optimize.inputs import LMCallsSpent
from leret.policies.checkpoints import find_model
from leret.training.algorithms import TrainingRecipe
from leret.training.model import training_record
from tests.optimize.fakes import TRAIN, VAL, Answering, Words, fake_lm, leret_of, student_of

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


SMALL = {"questions_per_round": 2, "num_generations": 4, "max_steps": 2, "device": "cpu"}


def compiled(run_dir, monkeypatch, **settings):
    monkeypatch.setattr("leret.optimize.inputs.is_trainable", lambda lm: lm.model == "leret/demo")
    frozen = fake_lm("frozen", finetuning_model=None)
    student = student_of(Answering, leret.LM("demo", max_tokens=8), answer=frozen)
    reward = {"reward": lambda example, outcome: len(outcome.text)}
    optimizer = leret_of(run_dir, algorithms=["grpo"], train_kwargs=SMALL, **reward, **settings)
    return optimizer.compile(student, trainset=TRAIN[:4], valset=VAL[:2])


def test_an_online_algorithm_trains_its_lm_once_and_no_other(tmp_path, monkeypatch):
    first, again = compiled(tmp_path, monkeypatch), compiled(tmp_path, monkeypatch)
    program = next(one["program"] for one in first.candidate_programs if one["stage"] == "grpo")
    record = training_record(find_model(program.write.lm.model.removeprefix("leret/")))
    entries = [entry for best in (first, again) for entry in best.trial_logs if "learning_rate" in entry]
    assert [entry["lm_calls"] > 0 for entry in entries] == [True, False]
    assert (record["algorithm"], record["key"]["recipe"]["learning_rate"]) == ("grpo", entries[0]["learning_rate"])
    assert program.answer.lm.model == "leret/frozen"
    assert not (tmp_path / "rollouts.db").exists()
    scores = [[(one["stage"], one["score"]) for one in best.candidate_programs] for best in (first, again)]
    assert scores[0] == scores[1]


def test_rounds_count_in_max_lm_calls(tmp_path, monkeypatch):
    with pytest.raises(LMCallsSpent, match="max_lm_calls=10"):
        compiled(tmp_path, monkeypatch, max_lm_calls=10)


@pytest.mark.parametrize(
    ("algorithm", "n", "rate", "keys"),
    [("sft", 1_500_000, 1e-3, {}), ("sft", 135e6, 5e-5, {}), ("sft", 8e9, 1e-5, {}), ("sft", 8e9, 1e-4, {"lora": {}}),
     ("ipo", 1e6, 5e-4, {}), ("ipo", 8e9, 5e-7, {}), ("ipo", 1e6, 5e-4, {"lora": {}}),
     ("grpo", 1_500_000, 2e-3, {}), ("grpo", 8e9, 1e-6, {}), ("ppo", 1e8, 9e-6, {})],
)  # fmt: skip
def test_the_learning_rate_follows_the_size_of_the_model(algorithm, n, rate, keys):
    recipe = TrainingRecipe.model_validate({"algorithm": algorithm, **keys})
    assert recipe.learning_rate_for(int(n)) == pytest.approx(rate)
