import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.training import TrainingRecipe
from leret.training.algorithms import ALGORITHMS


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"name": "base"}, "cannot name a policy"),
        ({"name": ".hidden"}, "cannot name a policy"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "remove one"),
        ({"max_steps": 3, "match_steps_of": "ipo"}, "max_steps and match_steps_of exclude each other"),
        ({"lora": {"quantization": "nf4"}}, "nf4 computes in bfloat16; set dtype: bfloat16 too"),
        ({"lora": {"quantization": "int3"}}, "lora.quantization"),
        ({"report_to": ["mlflow"]}, "trackio"),
        ({"eval_split": "test"}, "'dev' or 'train'"),
        ({"on_alarm": "ignore"}, "'warn' or 'stop'"),
    ],
)
def test_a_value_that_cannot_be_is_refused(keys, told):
    with pytest.raises(ValidationError, match=told):
        TrainingRecipe.model_validate({"algorithm": "sft", **keys})


def test_what_decides_no_weight_may_change_when_a_training_goes_on():
    assert ALGORITHMS
    free = free_keys(TrainingRecipe)
    assert {"report_to", "project", "run_name", "on_alarm", "save_steps"} <= free
    assert not {"eval_steps", "eval_tasks", "eval_split", "metric_for_best_model", "learning_rate"} & free
