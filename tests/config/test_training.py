from leret.config.base import free_keys
from leret.config.training import TrainingRecipe
from leret.training.algorithms import ALGORITHMS


def test_free_keys_decide_no_weight():
    assert ALGORITHMS
    free = free_keys(TrainingRecipe)
    assert {"report_to", "project", "run_name", "on_alarm", "save_steps"} <= free
    assert not {"eval_steps", "eval_tasks", "eval_split", "metric_for_best_model", "learning_rate"} & free
