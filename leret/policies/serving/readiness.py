"""The wait for a server: healthy, serving the right model, and warm; or what went wrong, in its own words."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from leret.core.errors import PolicyError
from leret.policies.serving.process import ServerProcess

_POLL_S = 0.25
_TOLD_EVERY_S = 15.0
_ANSWER_S = 5.0
_DYING_S = 2.0

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows nothing of this machine's ports


def wait_until_ready(
    server: ServerProcess,
    url: str,
    model: str,
    *,
    listed: bool,
    key: str | None,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    """Return once the server has answered one real chat completion.

    Args:
        server: its process.
        url: without /v1.
        model: as requests name it.
        listed: the server lists the model under this name; a server that lists others is not ours.
        key: sent as a bearer token; None sends none.
        timeout_s: for all of it.
        tell: hears now and then that it still waits.

    Raises:
        PolicyError: the process ended, the deadline passed, another server answers, or ours refused the completion.
    """
    began = time.monotonic()
    _wait_for_health(server, url, timeout_s, tell)
    tell(f"healthy after {time.monotonic() - began:.0f} s; one completion to warm it")
    if listed:
        _check_model(url, model, key)
    _warm(server, url, model, key, began + timeout_s, timeout_s)


def _wait_for_health(server: ServerProcess, url: str, timeout_s: float, tell: Callable[[str], None]) -> None:
    told = began = time.monotonic()
    while True:
        server.check_alive()
        left = began + timeout_s - time.monotonic()
        status, _ = _answer(f"{url}/health", None, None, min(_ANSWER_S, max(0.1, left)))
        if status == 200:
            server.check_alive()  # another's server may have taken the port, and ours died of it
            return
        now = time.monotonic()
        if now > began + timeout_s:
            said = f"answers {status}" if status else "does not answer"
            raise _failed(server, f"{url}/health {said} after {timeout_s:g} s; give it longer with --timeout")
        if now - told > _TOLD_EVERY_S:
            told = now
            tell(f"waiting for {url}, {now - began:.0f} s: {server.tail(1)[:160]}")
        time.sleep(_POLL_S)


def _check_model(url: str, model: str, key: str | None) -> None:
    """The served names include ours; SGLang's requests name an adapter after its base and a colon."""
    status, text = _answer(f"{url}/v1/models", None, key, _ANSWER_S)
    try:
        known = [str(entry["id"]) for entry in json.loads(text)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        known = []
    if known and not {model, model.split(":", 1)[0]} & set(known):
        raise PolicyError(
            f"{url} serves {', '.join(known)} and not {model}: another server listens there; take another --port"
        )


def _warm(server: ServerProcess, url: str, model: str, key: str | None, deadline: float, timeout_s: float) -> None:
    messages = [{"role": "user", "content": "Which city?"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "seed": 0}
    status, text = _answer(f"{url}/v1/chat/completions", body, key, max(1.0, deadline - time.monotonic()))
    if status == 0:
        until = time.monotonic() + _DYING_S
        while time.monotonic() < until:  # a process that is going down closes its connections a moment before it ends
            server.check_alive()
            time.sleep(_POLL_S / 5)
        raise _failed(server, f"{url} is healthy, but sent no completion ({text}); --timeout is {timeout_s:g} s")
    server.check_alive()
    try:
        said = json.loads(text)["choices"][0]["message"]["content"] if status == 200 else None
    except (ValueError, KeyError, IndexError, TypeError):
        said = None
    if not isinstance(said, str):
        raise _failed(
            server, f"{url} is healthy, but answered a chat completion with {status}: {server.hide(text)[:300]}"
        )


def _failed(server: ServerProcess, what: str) -> PolicyError:
    return PolicyError(f"{what}; see {server.log}{server.last_words()}").failed()


def _answer(url: str, body: dict[str, Any] | None, key: str | None, timeout_s: float) -> tuple[int, str]:
    """Status and text; status 0 and the reason where nothing was answered."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with _opener.open(request, timeout=timeout_s) as reply:
            return int(reply.status), reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off, no HTTP
        return 0, str(error)
