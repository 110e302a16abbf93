"""An LM on a running server that is sampled, trained from its weights, saved and loaded."""

import asyncio
import threading

import dspy
import pytest
from aiohttp import web

import leret
from leret.core.errors import ConfigError, PolicyError
from leret.optimize.inputs import server_of
from leret.policies.base import Request
from leret.policies.load import make_policy
from leret.policies.saved import PolicySettings
from tests.optimize.conftest import QUESTIONS, Asking

KEY = "sk-secret-key"
SFT = {"learning_rate": 1e-2, "device": "cpu"}


class Stub:
    """A chat completions server with one policy that records each request."""

    def __init__(self, policy):
        self.policy, self.requests, self.keys = policy, [], set()

    async def answer(self, request):
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization"))
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        first = body.get("seed") or 0
        seeds = tuple(range(first, first + body.get("n", 1)))
        asked = Request(tuple(body["messages"]), seeds, body.get("temperature", 1.0), min(limit, 6))
        choices = []
        for index, completion in enumerate(await self.policy.complete(asked)):
            message = {"role": "assistant", "content": completion.text}
            choices.append({"index": index, "message": message, "finish_reason": completion.finish_reason})
        return web.json_response({"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 6}})


@pytest.fixture
def stub(weights):
    policy = make_policy(PolicySettings.model_validate({"model": str(weights), "device": "cpu"}))
    stub = Stub(policy)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", stub.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    yield stub
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    policy.close()


@pytest.fixture(autouse=True)
def compact():
    with dspy.context(adapter=leret.CompactAdapter(), lm=None, rm=None):
        yield


def letters(example, prediction, trace=None):
    return len(prediction.answer) % 7 / 7


def student(lm):
    program = Asking()
    program.set_lm(lm)
    return program


def compiled(program, run_dir, trainset, **settings):
    optimizer = leret.LeReT(metric=letters, credit="final", run_dir=run_dir, samples=3, seed=1, **settings)
    return optimizer.compile(program, trainset=trainset)


def files_with(text, folder):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_served_lm_is_sampled_trained_saved_and_loaded(stub, weights, trainset, tmp_path, monkeypatch):
    lm = leret.LM("o/tiny", api_base=stub.url, weights=weights, api_key=KEY, max_tokens=6)
    best = compiled(student(lm), tmp_path / "run", trainset, algorithms=["sft"], train_kwargs=SFT)
    assert stub.keys == {f"Bearer {KEY}"}
    assert {body["model"] for body in stub.requests} == {"o/tiny"}
    assert {body["max_tokens"] for body in stub.requests} <= {6, 1}  # 1: the test of ``n``
    assert best.write.lm.model.startswith(f"leret/{tmp_path / 'run' / 'policies'}")
    assert server_of(best.write.lm) is None
    [note] = [entry["text"] for entry in best.trial_logs if entry["stage"] == "serve"]
    assert stub.url in note
    n_requests = len(stub.requests)
    answer = best(question=QUESTIONS[0])
    assert len(stub.requests) == n_requests  # the trained LM runs in this process
    best.save(tmp_path / "saved")
    assert files_with(KEY, tmp_path) == []
    loaded = leret.load(tmp_path / "saved", program=Asking())
    assert loaded.write.lm.copy(temperature=0.0)("a book") == best.write.lm.copy(temperature=0.0)("a book")
    assert isinstance(answer.answer, str)


def test_saved_lm_of_a_server_asks_for_its_key(stub, weights, tmp_path, monkeypatch):
    program = student(leret.LM("o/tiny", api_base=stub.url, api_key=KEY, max_tokens=6))
    leret.save(program, tmp_path)
    assert files_with(KEY, tmp_path) == []
    with pytest.raises(ConfigError, match="api_key_env"):
        leret.load(tmp_path, program=Asking())
    monkeypatch.setenv("SOME_KEY", KEY)
    loaded = leret.load(tmp_path, program=Asking(), api_key_env="SOME_KEY")
    assert isinstance(loaded.write.lm("a book")[0], str)
    assert stub.keys == {f"Bearer {KEY}"}


def test_dspy_lm_with_finetuning_model_is_trained(stub, weights, trainset, tmp_path):
    lm = dspy.LM("openai/o/tiny", api_base=stub.url, api_key=KEY, max_tokens=6, finetuning_model=str(weights))
    best = compiled(student(lm), tmp_path / "run", trainset, algorithms=["sft"], train_kwargs={lm: SFT})
    assert {body["model"] for body in stub.requests} == {"o/tiny"}
    assert best.answer.lm.model.startswith("leret/")
    stages = {candidate["stage"]: candidate["program"] for candidate in best.candidate_programs}
    assert stages["student"].write.lm is lm
    assert files_with(KEY, tmp_path) == []


def test_served_lm_answers_in_evaluate(stub, trainset):
    program = student(leret.LM("openai/o/tiny", api_base=stub.url, max_tokens=6))
    evaluate = dspy.Evaluate(devset=trainset[:2], metric=letters, num_threads=2, failure_score=-1.0)
    evaluate(program)
    assert {body["model"] for body in stub.requests} == {"o/tiny"}
    assert stub.keys == {None}


@pytest.mark.parametrize("make", [
    lambda url: leret.LM("tiny", api_base=url),
    lambda url: dspy.LM("openai/tiny", api_base=url, api_key=KEY),
])  # fmt: skip
def test_error_without_weights_says_what_to_write(make, stub, trainset, tmp_path):
    with pytest.raises(PolicyError) as caught:
        compiled(student(make(stub.url)), tmp_path / "run", trainset)
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
