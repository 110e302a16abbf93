import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.http.client import Call
from leret.retrieval.clients.base import SearchClient


def test_closing_ends_a_wait():
    url, asked = "http://127.0.0.1:9", (Call("GET", "/"), lambda answer: answer.json)
    waits = SearchClient((url,), RemoteSettings(urls=(url,), retry_for_s=600.0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.ask, asked)
        time.sleep(0.1)
        waits.close()
        for ask in (lambda: waiting.result(20), lambda: waits.ask(asked)):
            with pytest.raises(RetrievalError, match="closed"):
                ask()
