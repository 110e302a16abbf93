"""An LM on a running server that is sampled, trained from its weights, saved and loaded."""

import dspy
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

import leret
from leret.core.errors import ConfigError, PolicyError
from leret.optimize.inputs import server_of
from leret.policies.base import Request
from leret.policies.load import make_policy
from leret.policies.saved import PolicySettings
from tests.http.servers import serving
from tests.optimize.conftest import QUESTIONS, Asking
from tests.optimize.fakes import student_of
from tests.policies.servers import ChatServer

KEY = "sk-secret-key"
SFT = {"learning_rate": 1e-2, "device": "cpu"}


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


@pytest.fixture(autouse=True)
def compact():
    with dspy.context(adapter=leret.CompactAdapter(), lm=None, rm=None):
        yield


def letters(example, prediction, trace=None):
    return len(prediction.answer) % 7 / 7


def compiled(program, run_dir, trainset, **settings):
    optimizer = leret.LeReT(metric=letters, credit="final", run_dir=run_dir, samples=3, seed=1, **settings)
    return optimizer.compile(program, trainset=trainset)


def files_with(text, folder):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_served_lm_is_sampled_trained_saved_and_loaded(stub, weights, trainset, tmp_path):
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


def test_saved_lm_of_a_server_asks_for_its_key(stub, weights, tmp_path, monkeypatch):
    program = student_of(Asking, leret.LM("o/tiny", api_base=stub.url, api_key=KEY, max_tokens=6))
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
    best = compiled(student_of(Asking, lm), tmp_path / "run", trainset, algorithms=["sft"], train_kwargs={lm: SFT})
    assert {body["model"] for body in stub.bodies} == {"o/tiny"}
    assert best.answer.lm.model.startswith("leret/")
    stages = {candidate["stage"]: candidate["program"] for candidate in best.candidate_programs}
    assert stages["student"].write.lm is lm
    assert files_with(KEY, tmp_path) == []


@pytest.mark.parametrize(("kind", "name"), [(leret.LM, "tiny"), (dspy.LM, "openai/tiny")], ids=["leret", "dspy"])
def test_error_without_weights_says_what_to_write(kind, name, stub, trainset, tmp_path):
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
