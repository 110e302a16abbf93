import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

from leret.sampling.store.store import Store
from leret.viewer import app
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


def test_pages_are_served_with_a_policy_that_allows_no_other_source(shared, tmp_path, monkeypatch):
    async def work(client):
        paths = ("/q/q1/s0", "/questions.csv?search=q", "/assets/view.css", "/q/none")
        answers = [await client.get(path) for path in paths]
        assert [answer.status for answer in answers] == [200, 200, 200, 404]
        for answer in answers:
            assert "default-src 'none'; script-src 'self';" in answer.headers["Content-Security-Policy"]
        return [await answer.text() for answer in answers[:2]]

    page, table = visit(shared[0], tmp_path, work, monkeypatch)
    assert "query a" in page
    assert len(table.splitlines()) == 3  # evaluated questions come with the facts


def test_only_get_and_named_hosts_are_answered(shared, tmp_path, monkeypatch):
    async def work(client):
        assert (await client.post("/")).status == 405
        for host, status in (("evil.example", 403), ("localhost:1", 200)):
            assert (await client.get("/", headers={"Host": host})).status == status
        assert (await client.get("/assets/..%2Fapp.py")).status == 404
        answer = await client.get("/questions?min=x")
        assert (answer.status, await answer.text()) == (400, "min: 'x' is not a number")

    visit(shared[0], tmp_path, work, monkeypatch)


def test_a_token_is_needed_once(shared, tmp_path, monkeypatch):
    async def work(client):
        async def status(path):
            return (await client.get(path, allow_redirects=False)).status

        client.session.cookie_jar._unsafe = True  # cookies of an IP address
        return [await status(path) for path in ("/", "/?token=é", "/groups?token=secret", "/groups", "/assets/view.js")]

    assert visit(shared[0], tmp_path, work, monkeypatch, token="secret") == [401, 401, 302, 200, 200]


@pytest.mark.parametrize("break_data", [False, True])
def test_a_growing_run_is_followed_and_facts_appear(run, tmp_path, monkeypatch, break_data):
    monkeypatch.setattr(app, "_POLL_S", 0.05)
    if break_data:
        monkeypatch.setattr(app, "command", lambda run, file: ("python3", "-c", "raise SystemExit('no disk')"))

    async def until(client, path, wanted):
        while wanted not in (text := await (await client.get(path)).text()):
            await asyncio.sleep(0.1)
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
