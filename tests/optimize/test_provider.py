"""Providers and servers of an LM: finetuned, launched, killed; on a running server, trained from its weights, saved."""

from unittest.mock import Mock

import dspy
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal
from dspy.clients.utils_finetune import TrainDataFormat
from dspy.teleprompt.grpo import GRPO

import leret
from leret.core.errors import ConfigError, PolicyError, TrainingError
from leret.optimize import provider as module
from leret.optimize.inputs import server_of
from leret.policies.base import Request
from leret.policies.dspy_lm import policy_of
from leret.policies.load import make_policy
from leret.policies.saved import PolicySettings
from tests.http.servers import serving
from tests.optimize.conftest import QUESTIONS, Asking, greedy
from tests.optimize.fakes import student_of
from tests.policies.servers import ChatServer

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


KEY = "sk-secret-key"


class Stub(ChatServer):
    """Writes at most six tokens with a policy of this process."""

    models = ("o/tiny",)

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    async def route(self, request, body):
        if request.path != "/v1/chat/completions":
            return await super().route(request, body)
        seeds = tuple(body.get("seed", 0) + index for index in range(body.get("n", 1)))
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 6
        asked = Request(tuple(body["messages"]), seeds, body.get("temperature", 1.0), min(limit, 6))
        written = await self.policy.complete(asked)
        choices = [
            {
                "index": i,
                "message": {"content": one.text},
                "finish_reason": one.finish_reason,
                "token_ids": one.token_ids,
            }
            for i, one in enumerate(written)
        ]
        return web.json_response({"choices": choices, "usage": {"prompt_tokens": written[0].n_prompt_tokens}})

    @property
    def keys(self):
        return {seen.headers.get("Authorization") for seen in self.requests if seen.json is not None}


@pytest.fixture
def stub(weights):
    policy = make_policy(PolicySettings.model_validate({"model": str(weights), "device": "cpu"}))
    stub = Stub(policy)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(stub, under="/v1")):
        yield stub
    policy.close()


@pytest.fixture
def compact():
    with dspy.context(adapter=leret.CompactAdapter(), lm=None, rm=None):
        yield


def compiled(program, run_dir, trainset, **settings):
    optimizer = leret.LeReT(metric=length, credit="final", run_dir=run_dir, samples=3, seed=1, **settings)
    return optimizer.compile(program, trainset=trainset)


def files_with(text, folder):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_served_lm_is_sampled_trained_saved_and_loaded(compact, stub, weights, trainset, tmp_path):
    lm = leret.LM("o/tiny", api_base=stub.url, weights=weights, api_key=KEY, max_tokens=6)
    best = compiled(student_of(Asking, lm), tmp_path / "run", trainset, algorithms=["sft"], train_kwargs=SFT)
    assert stub.keys == {f"Bearer {KEY}"}
    assert {body["model"] for body in stub.bodies} == {"o/tiny"}
    assert {body["max_tokens"] for body in stub.bodies} == {6}
    assert best.write.lm.model.startswith(f"leret/{tmp_path / 'run' / 'policies'}")
    assert server_of(best.write.lm) is None
    [note] = [entry["text"] for entry in best.trial_logs if entry["stage"] == "serve"]
    assert stub.url in note
    n_requests = len(stub.requests)
    assert isinstance(best(question=QUESTIONS[0]).answer, str)
    assert len(stub.requests) == n_requests  # the trained LM runs in this process
    best.save(tmp_path / "saved")
    assert files_with(KEY, tmp_path) == []
    loaded = leret.load(tmp_path / "saved", program=Asking())
    assert loaded.write.lm.copy(temperature=0.0)("a book") == best.write.lm.copy(temperature=0.0)("a book")


def test_saved_lm_of_a_server_asks_for_its_key(compact, stub, tmp_path, monkeypatch):
    program = student_of(Asking, leret.LM("o/tiny", api_base=stub.url, api_key=KEY, max_tokens=6))
    leret.save(program, tmp_path)
    assert files_with(KEY, tmp_path) == []
    with pytest.raises(ConfigError, match="api_key_env"):
        leret.load(tmp_path, program=Asking())
    monkeypatch.setenv("SOME_KEY", KEY)
    loaded = leret.load(tmp_path, program=Asking(), api_key_env="SOME_KEY")
    assert isinstance(loaded.write.lm("a book")[0], str)
    assert stub.keys == {f"Bearer {KEY}"}


def test_dspy_lm_with_finetuning_model_is_trained(compact, stub, weights, trainset, tmp_path):
    lm = dspy.LM("openai/o/tiny", api_base=stub.url, api_key=KEY, max_tokens=6, finetuning_model=str(weights))
    best = compiled(student_of(Asking, lm), tmp_path / "run", trainset, algorithms=["sft"], train_kwargs={lm: SFT})
    assert {body["model"] for body in stub.bodies} == {"o/tiny"}
    assert best.answer.lm.model.startswith("leret/")
    stages = {candidate["stage"]: candidate["program"] for candidate in best.candidate_programs}
    assert stages["student"].write.lm is lm
    assert files_with(KEY, tmp_path) == []


@pytest.mark.parametrize(("kind", "name"), [(leret.LM, "tiny"), (dspy.LM, "openai/tiny")], ids=["leret", "dspy"])
def test_error_without_weights_says_what_to_write(kind, name, compact, stub, trainset, tmp_path):
    with pytest.raises(PolicyError) as caught:
        compiled(student_of(Asking, kind(name, api_base=stub.url, api_key=KEY)), tmp_path / "run", trainset)
    assert f"leret.LM('tiny', api_base='{stub.url}', weights=" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"api_base": "nowhere"}, "nowhere"), ({"api_version": "2"}, "api_version"), ({"weights": "demo"}, "weights"),
     ({"api_key": KEY}, "api_key"), ({"timeout": 3.0}, "timeout"), ({"headers": {"a": KEY}}, "headers"),
     ({"api_base": "http://x/v1", "api_key_env": "UNSET_KEY"}, "UNSET_KEY"),
     ({"api_base": "http://user:pass@x/v1"}, "urls"), ({"api_base": "http://x/v1", "timeout": -1}, "timeout_s")],
)  # fmt: skip
def test_wrong_connection_is_refused_in_words_of_leret(arguments, key):
    with pytest.raises(ConfigError) as caught:
        leret.LM("tiny", **arguments)
    assert key in str(caught.value)
    assert KEY not in str(caught.value)
    assert "engine" not in str(caught.value)


def test_connection_of_an_lm_cannot_be_changed(lm):
    with pytest.raises(ConfigError, match="api_base"):
        lm.copy(api_base="http://x/v1")
    with pytest.raises(ConfigError, match="api_base"):
        lm("a book", api_base="http://x/v1")
