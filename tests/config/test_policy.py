import pytest
from pydantic import ValidationError

from leret.config.policy import PolicySettings

OPENAI = {"kind": "openai", "model": "m"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"kind": "magic", "model": "m"}, "magic"),
        (OPENAI, "urls"),
        ({"kind": "local", "urls": ["http://a"]}, "urls"),
        ({**OPENAI, "urls": ["http://a"], "api_key_env": "sk-live-0123"}, "api_key_env"),
        ({**OPENAI, "urls": ["http://user:pw@a/v1"]}, "urls"),
        ({**OPENAI, "urls": ["http://a/v1?key=pw"]}, "urls"),
    ],
)
def test_settings_that_do_not_fit_their_kind_are_refused(given, place):
    with pytest.raises(ValidationError, match=place):
        PolicySettings.model_validate(given)
