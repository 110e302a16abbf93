import json
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from leret.core.errors import ConfigError
from leret.http.answers import Answer, ApiKey, RejectedError, RetryableError, retry_after_s

ADVICE = {True: "correct the key", False: "correct the URL"}
SECRET = "sk-0123456789abcdef"


def answer(status, body="busy"):
    return Answer("http://a/v1", status, {"Retry-After": "3"}, body.encode())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(408, "timeout"), (424, "server"), (429, "rate_limit"), (500, "server"), (502, "server"), (503, "overloaded")],
)
def test_an_overload_or_an_outage_is_retryable(status, kind):
    with pytest.raises(RetryableError, match=f"answered {status}: busy") as caught:
        answer(status).check(ADVICE)
    assert (caught.value.kind, caught.value.wait_s, caught.value.exit_code) == (kind, 3.0, 1)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 422])
def test_other_status_is_a_rejection_with_its_message(status):
    advice = "key" if status in {401, 403} else "URL"
    with pytest.raises(RejectedError, match=f"{status}: no such model; correct the {advice}") as caught:
        answer(status, json.dumps({"error": {"message": "no such model"}})).check(ADVICE)
    assert (caught.value.status, caught.value.exit_code) == (status, 2)


@pytest.mark.parametrize("body", ["<html>", "[" * 200_000, '{"a'])
def test_invalid_json_is_malformed_and_cut(body):
    with pytest.raises(RetryableError, match="http://a/v1 sent no JSON") as caught:
        _ = answer(200, body).json
    assert caught.value.kind == "malformed"
    with pytest.raises(RejectedError, match=r"\A.{,399}\Z"):
        answer(400, body).check(ADVICE)


def test_retry_after_is_read_as_seconds_or_as_a_date():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s({"Retry-After": date}) == pytest.approx(30, abs=3)
    unreadable = dict.fromkeys(["nan", "soon", "Wed, 21 Oct 2015 07:28:00 +99999999999999999999"])
    for value, seconds in {"1000000": 120, "-5": 0, **unreadable}.items():
        assert retry_after_s({"Retry-After": value}) == seconds


def test_key_is_only_in_its_header(monkeypatch):
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    key = ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert key.headers() == {"Authorization": f"Bearer {SECRET}"}
    assert ApiKey("Basic abc").headers() == {"Authorization": "Basic abc"}
    assert SECRET not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(key)


def test_key_is_redacted_before_a_cut():
    assert ApiKey(SECRET).redact(f"you sent {SECRET}; and {SECRET[:9]}...") == "you sent [key]; and [key]..."
    assert ApiKey("Basic s3cret").redact("who is s3cret?") == "who is [key]?"


@pytest.mark.parametrize("value", ["", " ", "sk-first\nsk-second", "sk-é"])
def test_variable_without_key_is_refused_without_value(value, monkeypatch):
    monkeypatch.setenv("TINY_KEY", value)
    with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*TINY_KEY") as caught:
        ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert "sk-" not in str(caught.value)
