import dspy
import pytest
import requests

from tests.retrieval.serving import Echo, remote, running

ODD = ["", " ", "capital \x00 city", "\ud800 river", 'NOT (city OR *) "river^2 ~field:x', "é", "x" * 1_000_000]


def test_dspys_client_reads_get_and_post_answers():
    with running(Echo()) as server:
        rankings = dspy.ColBERTv2(url=server.url)("a query & more=1", k=2)
        assert [(p["pid"], p["long_text"]) for p in rankings] == [
            (f"a query & more=1#{i}", "T | x | y") for i in range(2)
        ]
        post = dspy.ColBERTv2(url=f"{server.url}/api/search", post_requests=True)
        assert post("b", k=2, simplify=True) == ["T | x | y"] * 2
        host, port = server.url.rsplit(":", 1)
        assert dspy.ColBERTv2(host, port)("c", k=1)[0]["text"] == "T | x | y"


@pytest.mark.parametrize("protocol", ["leret", "colbert", "colbert-get", "retrieve"])
def test_all_protocols_return_the_engines_rankings(protocol):
    queries = [query for query in ODD if protocol != "colbert-get" or len(query) < 9_999]
    replacement = "?" if protocol == "colbert-get" else "\ufffd"
    with running(Echo()) as server:
        url = f"{server.url}/retrieve" if protocol == "retrieve" else server.url
        asker = remote(url, protocol=protocol, accept_empty=True)
        want = Echo().search([query.replace("\ud800", replacement) for query in queries], 3)
        assert asker.search(queries, 3) == want
        asker.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/?k=3", None, 400, "query: field required"),
        ("GET", "/?query=a&k=x", None, 400, "k: input should be a valid integer, not 'x'"),
        ("POST", "/", b"{", 400, "not valid JSON"),
        ("POST", "/search", b"{}", 400, "queries: field required"),
        ("POST", "/search", b'{"queries": ["a","a","a","a","a"]}', 400, "maximum is 4"),
        ("POST", "/search", b'{"queries": ["a","a","a"], "k": 50}', 400, "3 queries with k 50 request 150 documents"),
        ("POST", "/search", b'{"queries": ["' + b"a" * 300_000 + b'"]}', 413, "exceeds"),
        ("PUT", "/search", b"{}", 405, "Not Allowed"),
    ],
)
def test_a_bad_request_gets_a_reason(method, path, body, status, says):
    engine = Echo()
    with running(engine, max_k=50, max_waiting=4, max_documents=100, max_body=250_000) as server:
        answer = requests.request(method, f"{server.url}{path}", data=body, timeout=20)
        assert answer.status_code == status
        assert (answer.json()["error"], says in answer.json()["message"]) == (True, True), answer.text
        assert engine.batches == []
        assert requests.get(f"{server.url}/?query=a&k=1", timeout=20).status_code == 200
