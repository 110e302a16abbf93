import pytest

from tests.first_steps import refused


@pytest.mark.parametrize(
    ("host", "open_to_others"),
    [("localhost", False), ("127.0.0.2", False), ("::1", False), ("0.0.0.0", True), ("box.lan", True)],
)
def test_a_retriever_open_to_others_is_warned_of(tmp_path, host, open_to_others):
    out = refused("serve", "retriever", tmp_path / "gone", "--host", host)
    assert ("every machine on the network" in out) is open_to_others


def test_a_token_that_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    out = refused("serve", "retriever", tmp_path / "gone", "--token-env", "NO_TOKEN")
    assert ("--token-env" in out, "NO_TOKEN" in out) == (True, True), out
