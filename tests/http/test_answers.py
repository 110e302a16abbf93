from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from leret.core.errors import ConfigError
from leret.http.answers import Answer, ApiKey, HttpError, RejectedError, RetryableError, retry_after_s

ADVICE = {True: "correct the key", False: "correct the URL"}
SECRET = "sk-0123456789abcdef"


def answer(status: int, body: str = "busy", **headers: str) -> Answer:
    return Answer(
        "http://a/v1", status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode()
    )


@pytest.mark.parametrize(
    ("status", "kind"), [(408, "timeout"), (429, "rate_limit"), (500, "server"), (502, "server"), (503, "overloaded")]
)
def test_an_overload_or_an_outage_is_retryable(status: int, kind: str) -> None:
    with pytest.raises(RetryableError, match=f"answered {status}: busy") as caught:
        answer(status, Retry_After="3").check(ADVICE)
    assert (caught.value.kind, caught.value.wait_s, caught.value.exit_code) == (kind, 3.0, 1)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 422])
def test_any_other_status_is_a_rejection_with_the_servers_words(status: int) -> None:
    body = json.dumps({"error": {"message": "no such model"}})
    advice = "key" if status in {401, 403} else "URL"
    with pytest.raises(RejectedError, match=f"{status}: no such model; correct the {advice}") as caught:
        answer(status, body).check(ADVICE)
    assert (caught.value.status, caught.value.exit_code) == (status, 2)
    answer(200).check(ADVICE)
    with pytest.raises(RetryableError):
        answer(424).check(ADVICE, frozenset({424}))


@pytest.mark.parametrize("body", ["<html>", "[" * 200_000, '{"a'])
def test_what_is_no_json_is_malformed(body: str) -> None:
    with pytest.raises(RetryableError, match="http://a/v1 sent no JSON") as caught:
        _ = answer(200, body).json
    assert caught.value.kind == "malformed"
    with pytest.raises(HttpError) as told:
        answer(400, body).check(ADVICE)
    assert len(str(told.value)) < 400


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s({"Retry-After": date}) == pytest.approx(30, abs=3)
    assert retry_after_s({"Retry-After": "1000000"}) == 120.0
    for value in ("nan", "soon", "Wed, 21 Oct 2015 07:28:00 +99999999999999999999"):
        assert retry_after_s({"Retry-After": value}) is None
    assert retry_after_s({"Retry-After": "-5"}) == 0
    assert retry_after_s({}) is None


def test_a_key_is_in_one_header_and_not_printed_or_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", f"{SECRET}\n")
    key = ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert key.headers() == {"Authorization": f"Bearer {SECRET}"}
    assert ApiKey("Basic abc").headers() == {"Authorization": "Basic abc"}
    assert ApiKey.from_env(None, "policy.api_key_env").headers() == {}
    assert SECRET not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)


def test_a_key_is_redacted_also_where_a_message_was_cut() -> None:
    assert ApiKey(SECRET).redact(f"you sent {SECRET}; and {SECRET[:9]}...") == "you sent [key]; and [key]..."
    assert ApiKey("Basic s3cret").redact("who is s3cret?") == "who is [key]?"


@pytest.mark.parametrize("value", [None, " ", "sk-first\nsk-second", "sk-é"])
def test_a_variable_that_holds_no_key_is_refused_without_its_value(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KEY", value) if value else monkeypatch.delenv("TINY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"policy\.api_key_env: .*TINY_KEY") as caught:
        ApiKey.from_env("TINY_KEY", "policy.api_key_env")
    assert "sk-" not in str(caught.value)
