import json
from contextlib import closing

import dspy
import psutil
import pytest

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core.errors import ConfigError, PolicyError, ProgramError
from leret.policies.dspy_lm import policy_lm
from leret.policies.saved import Servers, lm_record, open_lm
from tests.policies.serving.conftest import fake_engine
from tests.sampling.fakes import SeededServer
from tests.tiny import TEMPLATE, tiny_policy

PROMPT = "who wrote the book ?"


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "saved").mkdir()
    return tiny_policy(tmp_path / "policies/ipo")


@pytest.fixture
def record(policy, tmp_path):
    lm = policy_lm(LocalPolicySettings(model=str(policy)), temperature=0.0, max_tokens=5)
    return json.loads(json.dumps(lm_record(lm, tmp_path / "saved")))


def loaded(record, directory, serve=None, key=None):
    with Servers() as servers:
        return open_lm(record, directory / "saved", serve, servers, key)


def test_a_loaded_policy_answers_as_before(record, policy, tmp_path):
    before = policy_lm(LocalPolicySettings(model=str(policy)), temperature=0.0, max_tokens=5)
    for serve in (None, "local"):
        assert loaded(record, tmp_path, serve)(PROMPT) == before(PROMPT)
    assert record["policy"]["model"] == "../policies/ipo"


def test_a_server_answers_where_the_policy_changed_or_is_missing(record, policy, tmp_path):
    (policy / "chat_template.jinja").write_text(TEMPLATE + "{# changed #}")
    for serve in (None, "local", "vllm"):
        with pytest.raises(PolicyError, match=r"chat template in .*policies/ipo.*serve=URL"):
            loaded(record, tmp_path, serve)
    policy.rename(tmp_path / "away")
    with pytest.raises(PolicyError, match=r"policy ipo-\w{8} of this program is missing.*restore it"):
        loaded(record, tmp_path)
    with closing(SeededServer()) as server:
        server.names, server.n_prompt_tokens = ("other", f"saved-{record['name']}"), record["n_tokens"]
        lm = loaded(record, tmp_path, server.url)
        assert (lm.model, lm.kwargs["api_base"]) == (f"openai/saved-{record['name']}", server.url)
        assert (lm.kwargs["temperature"], lm.kwargs["max_tokens"]) == (0.0, 5)


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [((), 0, "serves no model"), (("other",), 0, "serves other, but not ipo-"), (None, 3, "different chat template")],
)
def test_a_server_with_another_model_or_template_is_refused(record, tmp_path, names, more, says):
    with closing(SeededServer()) as server:
        server.names = (record["name"],) if names is None else names
        server.n_prompt_tokens = record["n_tokens"] + more
        with pytest.raises(PolicyError, match=says):
            loaded(record, tmp_path, server.url)


def test_vllm_is_started_and_ends_with_the_program(record, tmp_path, monkeypatch):
    monkeypatch.setenv("LERET_VLLM", str(fake_engine(tmp_path)))
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record"))
    with Servers() as servers:
        assert open_lm(record, tmp_path / "saved", "vllm", servers, None)(PROMPT) == ["Paris"]
        [pid] = json.loads((tmp_path / "record/pids.json").read_text())
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_served_policy_keeps_or_changes_its_server(tmp_path):
    settings = OpenAIPolicySettings(model="m", urls=("http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"))
    record = lm_record(policy_lm(settings, temperature=0.0), tmp_path / "saved")
    assert loaded(record, tmp_path).dump_state()["engine"]["state"]["urls"] == list(settings.urls)
    for serve in ("local", "vllm"):
        with pytest.raises(PolicyError, match="was on a server"):
            loaded(record, tmp_path, serve)
    with closing(SeededServer()) as server:
        server.names = ("m",)
        assert loaded(record, tmp_path, server.url).kwargs["api_base"] == server.url


def test_an_lm_returns_to_its_endpoint_with_a_named_key(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    lm = dspy.LM("openai/m", api_base="http://127.0.0.1:9/v1", api_key="sesame", temperature=0.3, max_tokens=7)
    record = lm_record(lm, tmp_path)
    assert "sesame" not in json.dumps(record)
    assert "MY_KEY" not in json.dumps(record)
    again = loaded(record, tmp_path, "local", "MY_KEY")
    keys = ("api_base", "api_key", "temperature", "max_tokens")
    assert (again.model, [again.kwargs[key] for key in keys]) == (lm.model, [lm.kwargs[key] for key in keys])
    with pytest.raises(ConfigError, match=r"API key for http://127\.0\.0\.1:9/v1.*api_key_env=.*lm="):
        loaded(record, tmp_path)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        loaded(record, tmp_path, None, "MY_KEY")


def test_no_key_of_another_server_is_sent_to_an_endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "public")
    monkeypatch.setenv("MY_KEY", "sesame")
    record = lm_record(dspy.LM("openai/m", api_base="http://127.0.0.1:9/v1"), tmp_path)
    for key in (None, "MY_KEY"):
        assert loaded(record, tmp_path, None, key).kwargs["api_key"] == "none"
    assert {"api_base", "api_key"}.isdisjoint(loaded(lm_record(dspy.LM("openai/m"), tmp_path), tmp_path).kwargs)


@pytest.mark.parametrize(
    ("lm", "says"),
    [
        (type("Subclass", (dspy.LM,), {})("openai/m"), "its class Subclass"),
        (dspy.LM("openai/m", extra_headers={"Authorization": "x"}), "extra_headers"),
        (dspy.LM("openai/m", api_base="http://me:word@127.0.0.1/v1"), "in its URL"),
        (dspy.LM("openai/m", stop=object()), "JSON"),
    ],
)
def test_secrets_and_unserializable_lms_are_refused(tmp_path, lm, says):
    with pytest.raises(ProgramError, match=rf"{says}.*lm=\.\.\."):
        lm_record(lm, tmp_path)
