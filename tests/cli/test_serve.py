"""`leret serve`: what is refused before anything listens."""

import pytest

from tests.first_steps import leret


@pytest.mark.parametrize(
    ("host", "open_to_others"),
    [("localhost", False), ("127.0.0.2", False), ("::1", False), ("0.0.0.0", True), ("box.lan", True)],
)
def test_a_retriever_open_to_others_is_warned_of(tmp_path, host, open_to_others):
    code, out = leret("serve", "retriever", tmp_path / "gone", "--host", host)
    assert (code, "every machine on the network" in out) == (2, open_to_others), out


def test_a_token_that_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    code, out = leret("serve", "retriever", tmp_path / "gone", "--token-env", "NO_TOKEN")
    assert (code, "--token-env" in out, "NO_TOKEN" in out) == (2, True, True), out
