"""`leret serve`: what is refused before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from leret.cli.serve import _is_loopback
from tests.cli.test_app import leret


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("box.lan", False)],
)
def test_only_this_machine_reaches_a_loopback_address(host: str, is_loopback: bool) -> None:
    assert _is_loopback(host) is is_loopback


def test_a_retriever_open_to_others_is_warned_of(tmp_path: Path) -> None:
    code, out = leret("serve", "retriever", tmp_path / "gone", "--host", "0.0.0.0")
    assert (code, "everybody may search" in out) == (2, True), out
    code, out = leret("serve", "retriever", tmp_path / "gone", "--host", "127.0.0.1")
    assert (code, "everybody may search" in out) == (2, False), out


def test_a_token_that_is_not_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    code, out = leret("serve", "retriever", tmp_path / "gone", "--token-env", "NO_TOKEN")
    assert (code, "--token-env" in out, "NO_TOKEN" in out) == (2, True, True), out
