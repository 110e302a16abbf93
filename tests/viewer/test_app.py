import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from leret.sampling.store.store import Store
from leret.viewer import app
from leret.viewer.pages import server_url
from tests.viewer.conftest import ORIGIN, sample, state


def visit(run, tmp_path, work, monkeypatch=None, **options):
    """Run ``work(client)`` with a viewer; with ``monkeypatch``, it collects no facts."""
    if monkeypatch is not None:
        monkeypatch.setattr(app, "sources", lambda run: None)

    async def serve():
        viewer = app.Viewer([run], tmp_path, **options)
        async with TestClient(TestServer(viewer.application())) as client:
            return await work(client)

    return asyncio.run(serve())


def statuses(*requests):
    async def work(client):
        answers = [await client.request(*one[:2], headers=one[2] if one[2:] else None) for one in requests]
        return [(answer.status, await answer.text()) for answer in answers]

    return work


def test_pages_are_served_with_a_policy_that_allows_no_other_source(shared, tmp_path, monkeypatch):
    async def work(client):
        page, style, missing = [await client.get(path) for path in ("/q/q1/s0", "/assets/view.css", "/q/none")]
        assert [page.status, style.status, missing.status] == [200, 200, 404]
        for answer in (page, style, missing):
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self';" in policy
        return await page.text()

    assert "query a" in visit(shared[0], tmp_path, work, monkeypatch)


def test_only_get_and_named_hosts_are_answered(shared, tmp_path, monkeypatch):
    requests = (
        ("POST", "/"), ("GET", "/", {"Host": "evil.example"}), ("GET", "/", {"Host": "localhost:1"}),
        ("GET", "/assets/..%2Fapp.py"), ("GET", "/questions?min=x"),
    )  # fmt: skip
    answers = visit(shared[0], tmp_path, statuses(*requests), monkeypatch)
    assert [status for status, _ in answers] == [405, 403, 200, 404, 400]
    assert answers[-1][1] == "min: 'x' is not a number"


def test_a_token_is_needed_once(shared, tmp_path, monkeypatch):
    async def work(client):
        async def status(path):
            return (await client.get(path, allow_redirects=False)).status

        client.session.cookie_jar._unsafe = True  # cookies of an IP address
        seen = [await status(path) for path in ("/", "/?token=é", "/groups?token=secret", "/groups", "/assets/view.js")]
        return seen

    assert visit(shared[0], tmp_path, work, monkeypatch, token="secret") == [401, 401, 302, 200, 200]


@pytest.mark.parametrize("name", ["..", "a\r\nb", "a/b", "?#"])
def test_a_question_with_any_id_has_a_page(run, tmp_path, monkeypatch, name):
    with Store(run.store) as store:
        store.put_state(state("z0", name))
        store.put_samples([sample("z", "z0", question_id=name)], ORIGIN)

    async def work(client):
        texts = []
        for parts in (("q", name), ("q", name, "z0")):
            answer = await client.get(URL(server_url(*parts), encoded=True))
            assert answer.status == 200
            texts.append(await answer.text())
        return texts

    for text in visit(run, tmp_path, work, monkeypatch):
        assert "query z" in text


def test_a_list_is_streamed_as_csv(shared, tmp_path, monkeypatch):
    [(status, body)] = visit(shared[0], tmp_path, statuses(("GET", "/questions.csv?search=q")), monkeypatch)
    assert (status, len(body.splitlines())) == (200, 3)  # evaluated questions come with the facts


@pytest.mark.parametrize("break_data", [False, True])
def test_a_growing_run_is_followed_and_facts_appear(run, tmp_path, monkeypatch, break_data):
    monkeypatch.setattr(app, "_POLL_S", 0.01)
    if break_data:
        monkeypatch.setattr(app, "command", lambda run, file: ("python3", "-c", "raise SystemExit('no disk')"))

    async def until(client, path, wanted):
        while wanted not in (text := await (await client.get(path)).text()):
            await asyncio.sleep(0.01)
        return text

    async def work(client):
        before = await (await client.get("/live?path=/questions")).text()
        with Store(run.store) as store:
            store.put_state(state("t9", "q2"))
            store.put_samples([sample("new", "t9", ("d3",), 0.0)], ORIGIN)
            store.flush()
            await until(client, "/q/q2/t9", "query new")
        assert before != await (await client.get("/live?path=/questions")).text()
        await until(client, "/questions", "no disk" if break_data else "q3 ")
        return await (await client.get("/coverage")).text()

    assert ("Title 2" in visit(run, tmp_path, work)) is not break_data
