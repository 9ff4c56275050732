"""The live view in a browser, against a live server of two engines with an API key."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect
from safetensors.torch import load_file

from harness.live import BLOCK_BYTES, KEY, Server, tiny
from tests.deep.observe.view.browser import TO_SCALE, Watched, chromium

pytestmark = pytest.mark.server

WITHIN_MS = 60_000
"""A busy machine draws late; the page asks every 300 ms."""
SIZES = {
    "phone": ViewportSize(width=390, height=844),
    "desktop": ViewportSize(width=1440, height=900),
}
ALONE, TOGETHER = [[0], [1]], [[0, 1]]
KV_BYTES = 67_108_864 - BLOCK_BYTES
"""Of an engine, without the block that vLLM keeps for itself."""

INSIDE = """engines => {
    const hull = document.querySelectorAll(".hull")[engines[0]].getBoundingClientRect();
    const inside = Array.from(document.querySelectorAll(".engine")).map(tile => {
        const { left, right, top, bottom } = tile.getBoundingClientRect();
        return left > hull.left && right < hull.right && top > hull.top && bottom < hull.bottom;
    });
    return inside.every((is, engine) => is === engines.includes(engine));
}"""
"""Whether the outline of the first of these engines has them in it and no others."""


BAR = """() => {
    if (!document.querySelector(".split"))
        return false;
    const [between, first, second] = document.querySelector(".split").children;
    const ends = [first, second].sort((a, b) => a.dataset.engines - b.dataset.engines);
    const [whole, left, right] = [between, ...ends].map(part => part.getBoundingClientRect());
    return ends[0].dataset.engines === "0" && ends[1].dataset.engines === "1"
        && whole.left === left.left && left.right <= right.left && right.right === whole.right;
}"""
"""Whether the first split request's bar covers engines 0 and 1."""


@pytest.fixture(scope="module")
def server(two_engines: tuple[Server, str]) -> Server:
    return two_engines[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(params=SIZES)
def watched(server: Server, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A fresh tab, which does not know the key, of a server whose engines are alone."""
    server.layout(ALONE)
    with tab(browser, SIZES[request.param]) as found:
        yield found
        assert [url for url in found.asked if not url.startswith(server.url + "/")] == []


@contextmanager
def tab(browser: Browser, size: ViewportSize) -> Iterator[Watched]:
    context = browser.new_context(viewport=size)
    try:
        yield Watched(context.new_page())
    finally:
        context.close()


def enter(page: Page, server: Server, key: str = KEY) -> None:
    """Open the view and give it the key."""
    page.goto(f"{server.url}/flying/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Show the server").click()


def fits(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways."""
    found: bool = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return found


@contextmanager
def load(server: Server, count: int, **fields: Any) -> Iterator[None]:
    """So many requests at a time, until the block is left."""
    leaving: list[bool] = []

    def ask(number: int) -> None:
        while not leaving:
            server.complete([number + 1] * 20, max_tokens=100, ignore_eos=True, **fields)

    with ThreadPoolExecutor(count) as threads:
        asked: list[Future[Any]] = [threads.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            leaving.append(True)
    for each in asked:
        each.result()


def test_layouts_change_on_screen_by_themselves(watched: Watched, server: Server) -> None:
    """Under load: engines of a group in one outline, its degree, figures, and the switch with its
    reason.
    """
    page = watched.page
    enter(page, server)
    expect(page.locator("#layout")).to_have_text("1+1")
    with load(server, 4):
        for groups, degrees, outlines in (
            (TOGETHER, "2", 1),
            (ALONE, "1+1", 2),
            (TOGETHER, "2", 1),
        ):
            server.layout(groups)
            expect(page.locator("#layout")).to_have_text(degrees, timeout=WITHIN_MS)
            expect(page.locator(".hull:not(.merged)")).to_have_count(outlines, timeout=WITHIN_MS)
            for engines in groups:
                for engine in engines:
                    group = ",".join(map(str, engines))
                    expect(page.locator(".engine").nth(engine)).to_have_attribute(
                        "data-group", group
                    )
                page.wait_for_function(INSIDE, arg=engines)
                badge = page.locator(".hull").nth(engines[0]).locator(".badge")
                expect(badge).to_have_text(f"TP {len(engines)}")
            newest = page.locator("#switches li").first
            expect(newest).to_contain_text("ordered by an operator")
            expect(newest).to_contain_text("cutover")
            assert fits(page)
        expect(page.locator(".hull").first.locator(".load b")).not_to_have_text("0")
        for figure in ("#ttft", "#tpot"):
            expect(page.locator(f"{figure} b")).not_to_have_text("–")
        expect(page.locator("#tokens b")).not_to_have_text("0")
    assert watched.problems == []


@pytest.mark.parametrize("watched", ["desktop"], indirect=True)
def test_a_tile_is_the_memory_of_its_engine(watched: Watched, server: Server) -> None:
    """Weights and KV to scale; nothing is said of weights that cannot be lent."""
    page = watched.page
    enter(page, server)
    expect(page.locator(".engine .kv")).to_have_text(["KV 0 % of 63.9\u00a0MiB"] * 2)
    memory = server.http.get("/flying/view").json()["engines"][0]["memory"]
    weights = load_file(tiny("llama") / "model.safetensors").values()
    assert memory["weight_bytes"] == sum(weight.nbytes for weight in weights)
    assert memory["kv_bytes"] == KV_BYTES
    assert memory["lent_bytes"] == 0
    page.wait_for_function(TO_SCALE, arg=memory)
    assert fits(page) and watched.problems == []


def test_a_split_request_is_one_bar_over_two_engines(watched: Watched, server: Server) -> None:
    """Each end is in its engine's column, and what is between them reaches from one to the
    other.
    """
    page = watched.page
    enter(page, server)
    with load(server, 2, vllm_xargs={"split_at": 90, "expected_tokens": 100}):
        row = page.locator(".split").first
        expect(row.locator(".first")).to_contain_text("· 90 tokens")
        expect(row.locator(".second")).to_contain_text("· then 30")
        page.wait_for_function(BAR)
        assert fits(page)
    expect(page.locator(".split")).to_have_count(0)
    expect(page.locator("#split-count")).to_contain_text("0 now")
    assert watched.problems == []


def test_key_is_asked_for_before_any_fetch(watched: Watched, server: Server) -> None:
    """Nothing is fetched without it; the tab then knows it, also when it is loaded again."""
    page = watched.page
    page.goto(f"{server.url}/flying/")
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator("#view")).to_be_hidden()
    assert watched.looks() == 0 and fits(page)
    enter(page, server)
    expect(page.locator("#view")).to_be_visible()
    page.reload()
    expect(page.locator("#link")).to_have_text("live")
    expect(page.get_by_label("API key")).to_be_hidden()
    assert watched.problems == []


def test_wrong_key_shows_no_figures(watched: Watched, server: Server) -> None:
    """The page says so and asks again; the browser itself logs the 401."""
    page = watched.page
    enter(page, server, "another-key")
    expect(page.locator("#ask-why")).to_have_text("The server refused this API key.")
    expect(page.locator("#view")).to_be_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    assert len(watched.problems) == 1 and "401" in watched.problems[0]
    page.get_by_label("API key").fill("schlüssel")
    page.get_by_role("button", name="Show the server").click()
    expect(page.locator("#ask-why")).to_contain_text("ASCII")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Show the server").click()
    expect(page.locator("#view")).to_be_visible()


@pytest.mark.parametrize("sent", ["", "Bearer another-key", f"Bearer {KEY}x", f"Basic {KEY}", KEY])
def test_data_never_comes_without_the_key(server: Server, sent: str) -> None:
    headers = {"Authorization": sent}
    answer = server.http.get("/flying/view", headers=headers)
    assert answer.status_code == 401
    page = server.http.get("/flying/", headers=headers)
    assert page.status_code == 200
    assert server.model not in answer.text + page.text


@pytest.mark.parametrize("watched", ["desktop"], indirect=True)
def test_a_hidden_tab_does_not_ask(watched: Watched, server: Server) -> None:
    """It goes on at once when it is seen again. The page's clock is the test's."""
    page = watched.page
    page.clock.install()
    enter(page, server)
    expect(page.locator("#link")).to_have_text("live")
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.clock.run_for(1000)
    before = watched.looks()
    page.clock.run_for(60_000)
    assert watched.looks() == before
    page.evaluate("delete document.hidden")
    with page.expect_response("**/flying/view"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert watched.looks() == before + 1


@pytest.mark.parametrize("watched", ["desktop"], indirect=True)
def test_a_server_that_does_not_answer_is_shown_as_lost(watched: Watched, server: Server) -> None:
    """What was known stays, faded, until it answers again."""
    page = watched.page
    enter(page, server)
    expect(page.locator("#link")).to_have_text("live")
    page.route("**/flying/view", lambda route: route.abort())
    expect(page.locator("#link")).to_have_text("no answer, trying again")
    expect(page.locator("main.stale")).to_be_visible()
    page.unroute("**/flying/view")
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("main.stale")).to_have_count(0)


def test_looks_are_not_logged(server: Server) -> None:
    """A page would write three lines a second; other requests are logged as ever."""
    assert server.http.get("/flying/view").status_code == 200
    assert server.http.get("/flying/switches").status_code == 200
    assert "GET /flying/switches" in server.log()
    assert "GET /flying/view" not in server.log()
