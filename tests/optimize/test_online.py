import pytest

import leret
from leret.optimize.inputs import LMCallsSpent
from leret.policies.checkpoints import find_model
from leret.training.algorithms import TrainingRecipe
from leret.training.model import training_record
from tests.optimize.fakes import TRAIN, VAL, Answering, fake_lm, leret_of, student_of

pytestmark = pytest.mark.usefixtures("world")
SMALL = {"questions_per_round": 2, "num_generations": 4, "max_steps": 2, "device": "cpu"}


def compiled(run_dir, algorithm, kind=None, student=None, **settings):
    student = student or student_of(lm=leret.LM("demo", max_tokens=8))
    settings = {"reward": lambda example, outcome: len(outcome.text), "train_kwargs": SMALL} | settings
    optimizer = leret_of(run_dir, algorithms=[algorithm], **settings)
    return optimizer.compile(student, trainset=TRAIN[:4], valset=VAL[:2])


def check_trained(best, algorithm, run_dir):
    [entry] = [entry for entry in best.trial_logs if "learning_rate" in entry]
    program = next(one["program"] for one in best.candidate_programs if one["stage"] == algorithm)
    record = training_record(find_model(program.write.lm.model.removeprefix("leret/")))
    assert (entry["learning_rate"], record["algorithm"]) == (record["key"]["recipe"]["learning_rate"], algorithm)
    assert entry["lm_calls"] > 0
    assert not (run_dir / "rollouts.db").exists()


def test_an_online_algorithm_samples_and_trains_the_student(tmp_path):
    check_trained(compiled(tmp_path, "ppo"), "ppo", tmp_path)


def test_an_online_training_is_not_repeated(tmp_path):
    first = compiled(tmp_path, "grpo")
    check_trained(first, "grpo", tmp_path)
    again = compiled(tmp_path, "grpo")
    scores = [[(one["stage"], one["score"]) for one in best.candidate_programs] for best in (first, again)]
    assert scores[0] == scores[1]
    assert [entry["lm_calls"] for entry in again.trial_logs if "learning_rate" in entry] == [0]


def test_rounds_count_in_max_lm_calls(tmp_path):
    with pytest.raises(LMCallsSpent, match="max_lm_calls=10"):
        compiled(tmp_path, "grpo", max_lm_calls=10)


def test_another_lm_of_the_student_answers_in_rounds_and_stays(tmp_path):
    student = student_of(Answering, leret.LM("demo", max_tokens=8))
    student.answer.lm = other = fake_lm("frozen", finetuning_model=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leret.optimize.inputs.is_trainable", lambda lm: lm.model == "leret/demo")
        best = compiled(tmp_path, "grpo", student=student)
    program = next(one["program"] for one in best.candidate_programs if one["stage"] == "grpo")
    assert program.answer.lm.model == other.model
    assert program.write.lm.model != "leret/demo"


@pytest.mark.parametrize(
    ("algorithm", "n", "rate", "keys"),
    [("sft", 1_500_000, 1e-3, {}), ("sft", 22_000_000, 1.7e-4, {}), ("sft", 135e6, 5e-5, {}),
     ("sft", 8e9, 1e-5, {}),
     ("ipo", 1_000_000, 5e-4, {}), ("ipo", 135e6, 2e-5, {}), ("ipo", 8e9, 5e-7, {}),
     ("grpo", 1_500_000, 2e-3, {}), ("grpo", 135e6, 4e-5, {}), ("grpo", 8e9, 1e-6, {}),
     ("ppo", 1e8, 9e-6, {}), ("sft", 8e9, 1e-4, {"lora": {}}), ("ipo", 1_000_000, 5e-4, {"lora": {}})],
)  # fmt: skip
def test_the_learning_rate_follows_the_size_of_the_model(algorithm, n, rate, keys):
    recipe = TrainingRecipe.model_validate({"algorithm": algorithm, **keys})
    assert recipe.learning_rate_for(int(n)) == pytest.approx(rate)
