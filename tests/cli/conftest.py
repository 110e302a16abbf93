"""A tiny policy, and overrides that make a sampling short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def small(policy: Path) -> list[str]:
    """Overrides that make the demo's sampling a matter of seconds."""
    values = {"policy.model": policy, "data.limit": 6, "sampling.samples": 2, "policy.max_tokens": 6,
              "sampling.prompts": 1}  # fmt: skip
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
