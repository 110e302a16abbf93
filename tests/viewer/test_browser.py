"""The pages in Chromium, driven by Playwright from PyPI; skipped if one of them is missing."""

import shutil
from html import unescape

import pytest

from leret.viewer import app
from tests.retrieval.serving import listening
from tests.viewer.conftest import SHOWN

playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

PATHS = ("/", "/questions", "/groups", "/pairs", "/trainings", "/prompts", "/coverage", "/q/q1", "/q/q1/s0", "/q/q3")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def viewer(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "sources", lambda run: None)
    viewer = app.Viewer([shared[0]], tmp_path)
    viewer.runs["run"].use(shared[1])
    return viewer


@pytest.fixture
def url(viewer):
    with listening(viewer.application(), 1.0) as server:
        yield server.url


@pytest.fixture
def page(browser):
    context = browser.new_context()
    page, seen, requests = context.new_page(), [], []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield page
    assert seen == []
    assert [one for one in requests if not one.startswith(("http://127.0.0.1:", "file:///"))] == []
    context.close()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_hostile_texts_are_shown_and_pages_fit(page, url, width, theme):
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=theme)
    for path in PATHS:
        page.goto(f"{url}{path}")
        for details in page.locator("details").all():
            details.evaluate("one => { one.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.title() != "hacked"
        assert page.locator("main script, main [onclick], main iframe").count() == 0
    page.goto(f"{url}/q/q1?policy=P1")
    assert page.locator("#b .query").inner_text() == unescape(SHOWN)


def test_keys_move_open_search_and_help(page, url):
    page.goto(f"{url}/questions")
    page.keyboard.press("/")
    page.keyboard.type("q1")
    page.keyboard.press("Enter")
    page.wait_for_url("**/questions?search=q1*")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/q/q1")
    page.goto(f"{url}/q/q1?policy=P1")
    for key, selected in (("j", "a"), ("j", "b"), ("k", "a"), ("Enter", "a"), ("?", "a")):
        page.keyboard.press(key)
        assert page.locator(".selected").get_attribute("id") == selected
    assert page.locator("#p-a").get_attribute("open") == ""
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.locator("#keys").click()
    assert page.locator("#help").is_visible()
