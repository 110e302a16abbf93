from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leret.config.policy import LocalPolicySettings, PolicySettings


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"kind": "magic", "model": "m"}, "magic"),
        ({"kind": "openai", "model": "m"}, "urls"),
        ({"kind": "tgi", "urls": ["http://a"]}, "model"),
        ({"kind": "together"}, "model"),
        ({"kind": "local", "urls": ["http://a"]}, "urls"),
        ({"kind": "together", "model": "m", "enable_thinking": False}, "enable_thinking"),
        ({"kind": "openai", "model": "m", "urls": ["http://a"], "api_key_env": "sk-live-0123"}, "api_key_env"),
        ({"kind": "openai", "model": "m", "urls": ["http://user:pw@a/v1"]}, "urls"),
        ({"kind": "openai", "model": "m", "urls": ["http://a/v1?key=pw"]}, "urls"),
    ],
)
def test_settings_that_do_not_fit_their_kind_are_refused(given: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        PolicySettings.model_validate(given)


def test_settings_have_defaults_of_their_kind() -> None:
    assert PolicySettings.model_validate({}) == LocalPolicySettings(model="demo")
    together: Any = PolicySettings.model_validate({"kind": "together", "model": "m"})
    assert (together.urls, together.api_key_env) == (("https://api.together.ai/v1",), "TOGETHER_API_KEY")
    tgi: Any = PolicySettings.model_validate({"kind": "tgi", "model": "m", "urls": ["http://a"]})
    assert tgi.tokenizer == "m"
    local = tgi.model_copy(update={"temperature": 0.5, "enable_thinking": False}).in_process("mine")
    assert local == LocalPolicySettings(model="mine", temperature=0.5, enable_thinking=False)
