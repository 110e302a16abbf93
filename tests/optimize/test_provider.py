from unittest.mock import Mock

import dspy
import pytest
from dspy.clients.utils_finetune import TrainDataFormat
from dspy.teleprompt.grpo import GRPO

import leret
from leret.core.errors import ConfigError, PolicyError, TrainingError
from leret.optimize import provider as module
from leret.policies.dspy_lm import policy_of
from tests.optimize.conftest import QUESTIONS, Asking, greedy

SFT = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "device": "cpu"}


@pytest.fixture
def calls(monkeypatch):
    made = Mock()
    for name in ("launch", "kill", "finetune"):
        getattr(made, name).side_effect = getattr(leret.Provider, name)
        monkeypatch.setattr(leret.Provider, name, getattr(made, name))
    return made.method_calls


def length(example, prediction, trace=None):
    return len(prediction.answer) % 10 / 10


def test_stock_bootstrap_finetune_trains_through_it_and_is_loaded_trainable(program, trainset, lm, calls, tmp_path):
    optimizer = dspy.BootstrapFinetune(train_kwargs=SFT, num_threads=2)
    compiled = optimizer.compile(program, trainset=trainset, teacher=None)
    [(kill, killed, _), (tune, _, asked)] = calls
    assert (kill, killed, tune) == ("kill", (lm, None), "finetune")
    assert (asked["model"], asked["train_data_format"]) == (lm.model, TrainDataFormat.CHAT)
    assert len(asked["train_data"]) == 2 * len(QUESTIONS)
    assert {row["messages"][-1]["role"] for row in asked["train_data"]} == {"assistant"}
    assert asked["train_kwargs"].items() >= SFT.items()
    new = compiled.write.lm
    assert (new is compiled.answer.lm, new.model != lm.model, greedy(new) != greedy(lm)) == (True, True, True)
    compiled.save(str(tmp_path / "program.json"))
    loaded = Asking()
    loaded.load(str(tmp_path / "program.json"), allow_unsafe_lm_state=True)
    again = loaded.write.lm
    assert (type(again), again.provider.finetunable) == (leret.LM, True)
    assert (again.model, again.kwargs, greedy(again)) == (new.model, new.kwargs, greedy(new))


def test_stock_grpo_is_refused_with_what_to_use(program, trainset):
    optimizer = GRPO(metric=length, exclude_demos=True, num_train_steps=2, num_threads=2)
    with pytest.raises(TrainingError, match=r'use leret\.LeReT\(algorithms=\["grpo"\]'):
        optimizer.compile(program, trainset=trainset)


def test_launch_and_kill_start_and_stop_one_server(weights, engine):
    lm = leret.LM(weights, launch_kwargs={"engine": "vllm", "executable": str(engine)}, max_tokens=6)
    text = greedy(lm)
    lm.launch()
    started = dict(module._servers)
    lm.copy().launch()
    assert (greedy(lm), greedy(lm.copy()), module._servers) == ("Paris", "Paris", started)
    assert policy_of(lm).settings.urls
    for _ in range(2):
        lm.kill()
    assert (greedy(lm), module._servers) == (text, {})


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"engine": "vlm"}, ConfigError, "launch_kwargs: engine: 'vlm' is not one of vllm, tgi"),
        ({"engine": "vllm", "executable": "/bin/false", "timeout_s": 20}, PolicyError, "exited with code 1"),
    ],
)
def test_a_server_that_cannot_start_is_an_error(lm, keys, error, message):
    with pytest.raises(error, match=message):
        lm.launch(keys)
    assert module._servers == {}


def test_the_demo_policy_has_a_name_of_its_own():
    assert leret.LM().model == leret.LM("demo").model == leret.LM("leret/demo").model == "leret/demo"
    assert leret.Provider.is_provider_model("leret/demo")
    assert not leret.Provider.is_provider_model("openai/gpt")
