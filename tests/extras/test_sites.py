from types import SimpleNamespace

import pytest

from leret.core.errors import RetrievalError
from leret.extras.sites import Site
from leret.http.client import HttpError, RejectedError


def site(**answers):
    client = SimpleNamespace(ask_each=lambda terms: [answers[term] for term in terms])
    return Site("the site", 9, client, lambda term, k: term, (), {400})


def test_offline_only_blank_queries_need_no_cache():
    assert site().ask(["", "?!"], 1, offline=True)[1] == {}
    with pytest.raises(RetrievalError, match=r"1 queries are not in the cache \(first: 'a'\).*offline: false"):
        site().ask(["", "a"], 1, offline=True)


def test_a_refused_query_is_empty_if_a_plain_one_succeeds(caplog):
    syntax, key = RejectedError("answered 400: syntax", 400), RejectedError("answered 400: API key invalid", 400)
    away = HttpError("away")
    good = site(a=("a",), b=syntax, c=key, d=away, heart=())
    assert good.ask(["a", "b", "c", "d"], 1, offline=False)[1] == {"a": ("a",), "b": (), "c": key, "d": away}
    assert good.ask(["b"], 1, offline=False)[1] == {"b": ()}
    assert (good.n_refused, caplog.text.count("refused the syntax of a query")) == (2, 1)
    fault = site(a=syntax, heart=away).ask(["a"], 1, offline=False)[1]["a"]
    assert "refuses even a simple query with the current settings: away" in str(fault)
