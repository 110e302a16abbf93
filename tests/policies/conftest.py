"""Tiny real models, made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leret.config.policy import LocalPolicySettings
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policies") / "tiny-llama")


@pytest.fixture(scope="module")
def policy(llama_dir: Path) -> Iterator[LocalPolicy]:
    loaded = LocalPolicy(LocalPolicySettings(model=str(llama_dir)))
    yield loaded
    loaded.close()


def ask(text: str, *seeds: int, temperature: float = 1.0, max_tokens: int = 8, stop: tuple[str, ...] = ()) -> Request:
    """A request of one user message."""
    return Request(({"role": "user", "content": text},), seeds or (0,), temperature, max_tokens, stop=stop)
