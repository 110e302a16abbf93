"""A server that fails in the ways real ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leret.core.errors import PolicyError
from leret.policies.serving.engines import Listening
from leret.policies.serving.launch import ServerPlan, plan, run_server
from leret.policies.serving.model import ServedModel
from tests.policies.serving.conftest import Serve, gone


@pytest.fixture
def planned(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(mode: str, engine: str = "vllm", **options: Any) -> ServerPlan:
        for name, value in {"FAKE_ENGINE": mode, "FAKE_RECORD": str(serve.record), "K": "s3cret-key"}.items():
            monkeypatch.setenv(name, value)
        at = Listening("127.0.0.1", serve.port)
        return plan(ServedModel("mine", "/m"), engine, at, executable=str(serve.executable), **options)

    return make


FAULTS = {
    "dies at start": (5, ["exited with code 3", "RuntimeError: not enough memory for the KV cache"]),
    "never healthy": (1, ["/health answers 503 after 1 s"]),
    "silent": (1, ["/health does not answer after 1 s"]),
    "another server": (5, ["serves somebody-elses and not mine"]),
    "cannot complete": (5, ["head_dim=16 is not supported (Bearer [key])", "refused Bearer [key]"]),
    "dies of a completion": (5, ["exited with code 7", "RuntimeError: no such kernel"]),
}


@pytest.mark.parametrize("mode", FAULTS)
def test_a_failed_server_is_stopped_and_its_last_words_told(
    serve: Serve, planned: Any, mode: str, tmp_path: Path
) -> None:
    timeout_s, says = FAULTS[mode]
    told: list[str] = []
    server = run_server(planned(mode, api_key_env="K"), timeout_s=timeout_s, log=tmp_path / "log", tell=told.append)
    with pytest.raises(PolicyError) as caught, server:
        raise AssertionError("it was called ready")
    assert all(text in str(caught.value) for text in says), str(caught.value)
    assert "s3cret-key" not in f"{caught.value} {told}"
    pids = serve.record / "pids.json"
    assert gone(json.loads(pids.read_text()) if pids.is_file() else [])


def test_a_server_that_ignores_the_end_is_killed_with_its_children(serve: Serve, planned: Any, tmp_path: Path) -> None:
    told: list[str] = []
    with run_server(planned("stubborn"), grace_s=0.5, log=tmp_path / "log", tell=told.append):
        pids = serve.recorded("pids.json")
    assert len(pids) == 2
    assert "did not end within 0.5 s and was killed" in told[-1]
    assert gone(pids)


def test_a_tgi_that_lists_a_path_is_ready(serve: Serve, planned: Any, tmp_path: Path) -> None:
    with run_server(planned("well", "tgi"), timeout_s=30, log=tmp_path / "log"):
        assert serve.requests()[0]["body"]["model"] == "mine"
