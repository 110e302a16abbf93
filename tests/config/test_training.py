import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.training import TrainingRecipe
from leret.training.algorithms import ALGORITHMS


def test_free_keys_decide_no_weight():
    assert ALGORITHMS
    free = free_keys(TrainingRecipe)
    assert {"report_to", "project", "run_name", "on_alarm", "save_steps"} <= free
    assert not {"eval_steps", "eval_tasks", "eval_split", "metric_for_best_model", "learning_rate"} & free


QUESTION_GROUPS = {
    "credit step": {"algorithm": "grpo", "credit": "step"},
    "stored states": {"algorithm": "rloo", "states": "stored"},
    "loss kl": {"algorithm": "pick", "loss": "kl"},
    "state": {"algorithm": "pqn"},
}


@pytest.mark.parametrize(("message", "keys"), QUESTION_GROUPS.items())
def test_question_groups_refuse_what_they_would_ignore(message, keys):
    with pytest.raises(ValidationError, match=message):
        ALGORITHMS[keys["algorithm"]].settings.model_validate({**keys, "groups": "question"})
