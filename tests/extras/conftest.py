import pytest

from tests.extras.fetch.site import sites
from tests.extras.tinker_server import BASE, KEY, TinkerStub
from tests.training.conftest import base, run, sampled_once  # noqa: F401


@pytest.fixture
def stub(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    stub = TinkerStub(base)
    with sites(stub):
        yield stub


@pytest.fixture
def tinker_run(run, base, stub):  # noqa: F811
    server = {"url": stub.url, "api_key_env": "TINKER_API_KEY"}
    policy = {"kind": "tinker", "model": BASE, **server, "tokenizer": str(base), "max_tokens": 6}
    run.update(sampling={**run.sampling(), "policy": policy})
    return run
