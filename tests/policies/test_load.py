from __future__ import annotations

from pathlib import Path

import pytest

from leret.config import PolicySettings
from leret.errors import ConfigError
from leret.policies.load import load_policy, policy_state, shared_policy
from leret.policies.local import LocalPolicy
from leret.policies.openai import OpenAIPolicy


def test_a_policy_is_loaded_by_its_kind(llama_dir: Path) -> None:
    local = load_policy("local", llama_dir, threads=1)
    assert isinstance(local, LocalPolicy)
    assert local.name == "tiny-llama"
    served = load_policy("openai", "tiny", urls=["http://a/v1"])
    assert isinstance(served, OpenAIPolicy)
    with pytest.raises(ConfigError, match="magic"):
        load_policy("magic", "tiny")


def test_equal_settings_share_a_policy_until_it_is_closed(llama_dir: Path) -> None:
    settings = PolicySettings(model=str(llama_dir))
    one = shared_policy(settings)
    assert shared_policy(settings.model_copy(update={"temperature": 0.3})) is one
    assert isinstance(one, LocalPolicy)
    one.close()
    assert shared_policy(settings) is not one


def test_a_state_loads_the_policy_again_and_holds_no_key(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-secret")
    served = load_policy("openai", "tiny", urls=["http://a/v1"], api_key_env="TINY_KEY")
    state = policy_state(served)
    assert "sk-secret" not in str(state)
    again = shared_policy(PolicySettings(**state))
    assert again.digest == served.digest
    local = policy_state(load_policy("local", llama_dir, enable_thinking=False))
    assert local == {"kind": "local", "model": str(llama_dir), "dtype": "auto", "enable_thinking": False}
