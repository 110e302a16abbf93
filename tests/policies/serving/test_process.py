import pytest

from leret.core.errors import PolicyError
from leret.http.endpoints import Listening
from leret.policies.serving.launch import plan, run_server
from leret.policies.serving.model import ServedModel
from tests.policies.serving.conftest import gone


@pytest.fixture
def server(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("leret.policies.serving.process._DYING_S", 0.2)

    def run(mode, api_key_env=None, **options):
        for name, value in {"FAKE_ENGINE": mode, "FAKE_RECORD": str(serve.record), "K": "s3cret-key"}.items():
            monkeypatch.setenv(name, value)
        at, executable = Listening("127.0.0.1", serve.port), str(serve.executable)
        planned = plan(ServedModel("mine", "/m"), "vllm", at, executable=executable, api_key_env=api_key_env)
        return run_server(planned, log=tmp_path / "log", **options)

    return run


@pytest.mark.parametrize(
    ("mode", "timeout_s", "says"),
    [
        ("dies at start", 5, ["exited with code 3", "RuntimeError: not enough memory for the KV cache"]),
        ("never ready", 1, ["sent no completion within 1 s", "503"]),
        ("cannot complete", 5, ["head_dim=16 is not supported (Bearer [key])", "refused Bearer [key]"]),
    ],
)
def test_a_failed_server_is_stopped_and_its_log_shown(serve, server, mode, timeout_s, says):
    messages = []
    started = server(mode, api_key_env="K", timeout_s=timeout_s, tell=messages.append)
    with pytest.raises(PolicyError) as caught, started:
        raise AssertionError("it was called ready")
    assert [text for text in says if text not in str(caught.value)] == []
    assert "s3cret-key" not in f"{caught.value} {messages}"
    assert gone(serve.recorded("pids.json", wait_s=0) or [])


def test_a_server_that_ignores_the_end_is_killed_with_its_children(serve, server):
    messages = []
    with server("stubborn", grace_s=0.5, tell=messages.append):
        pids = serve.recorded("pids.json")
    assert len(pids) == 2
    assert "did not end within 0.5 s and was killed" in messages[-1]
    assert gone(pids)
