"""The live view of a server that has lost an engine."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ViewportSize, expect

from harness.live import Server
from harness.losing import is_whole, lost
from tests.deep.observe.view.browser import Watched, chromium

pytestmark = pytest.mark.server

SIZES = {
    "phone": ViewportSize(width=390, height=844),
    "desktop": ViewportSize(width=1440, height=900),
}
OVERLAP = """() => {
    const hulls = Array.from(document.querySelectorAll(".hull"));
    const [one, other] = hulls.map(hull => hull.getBoundingClientRect());
    return one.left < other.right && other.left < one.right
        && one.top < other.bottom && other.top < one.bottom;
}"""
MARKS = (
    "() => Array.from(document.querySelectorAll('#band .row'), row => "
    "row.querySelectorAll('i').length)"
)
"""All at once: the page goes on drawing."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2) as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("size", SIZES)
def test_a_lost_engine_says_since_when_and_why(server: Server, browser: Browser, size: str) -> None:
    """In its tile, beside the one that is left; the page says which it is. `/health` is as ever."""
    context = browser.new_context(viewport=SIZES[size])
    watched = Watched(page := context.new_page())
    server.layout([[0, 1]])
    page.goto(f"{server.url}/flying/")
    expect(page.locator("#layout")).to_have_text("2")
    expect(page.locator("#band .row i[data-degree='2']").first).to_be_attached()
    with lost(server, 1):
        expect(page.locator("#link")).to_have_text("degraded: engine 1 is lost")
        expect(page.locator("#layout")).to_have_text("1")
        expect(page.locator(".hull").nth(1).locator(".badge")).to_have_text("lost")
        expect(page.locator(".engine").nth(1).locator(".why")).to_contain_text(
            "its process has ended"
        )
        expect(page.locator(".hull").nth(0).locator(".badge")).to_have_text("TP 1")
        page.wait_for_function(f"() => !({OVERLAP})()")
        page.wait_for_function(
            "() => document.querySelector('#band .row:nth-child(2) i[data-degree=lost]')"
        )
        left, gone = page.evaluate(MARKS)
        assert left == gone
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert server.http.get("/health").status_code == 200
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator(".engine").nth(1).locator(".why")).to_have_text("")
    expect(page.locator(".gone")).to_have_count(0)
    assert is_whole(server) and watched.problems == []
    context.close()
