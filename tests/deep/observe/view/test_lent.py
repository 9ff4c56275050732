"""The live view of a server that lends weights: how much of an engine's memory has which owner,
while it changes.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from harness.live import BLOCK_BYTES, Server
from tests.deep.observe.view.browser import TO_SCALE, Watched, chromium
from tests.deep.observe.view.screenshots import PHONE

pytestmark = pytest.mark.server

BLOCKS = 9
"""Of 32 tokens: an engine holds 256, a group of two 512."""
LONG = 600
APART, TOGETHER = [[0], [1]], [[0, 1]]
LENT = re.compile(r"^KV \d+ % of [\d.]+\sMiB[\d.]+\sMiB of it lent by weights$")
WHOLE = re.compile(r"^KV \d+ % of [\d.]+\sMiB$")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        "llama", 2, f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}", "--lend-weights"
    ) as live:
        yield live


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    with chromium() as browser:
        found = Watched(browser.new_page(viewport=PHONE))
        found.page.goto(f"{server.url}/flying/")
        yield found


def memory(server: Server) -> dict[str, Any]:
    """What the page is told of the first engine."""
    found: dict[str, Any] = server.http.get("/flying/view").json()["engines"][0]["memory"]
    return found


def figures(watched: Watched) -> Locator:
    """What each tile says of its memory."""
    return watched.page.locator(".engine .kv")


def test_weights_shrink_by_what_they_lend_and_grow_again(watched: Watched, server: Server) -> None:
    """A long request has them lend, its end changes nothing, and a switch to engines alone has them
    come back.
    """
    server.layout(TOGETHER)
    for _ in range(2):
        expect(figures(watched)).to_have_text([WHOLE, WHOLE])
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(server.complete, [1] * LONG, max_tokens=40, ignore_eos=True)
            expect(figures(watched)).to_have_text([LENT, LENT])
            answer.result()
        expect(figures(watched)).to_have_text([re.compile("^KV 0 % "), re.compile("^KV 0 % ")])
        lent = memory(server)
        assert lent["lent_bytes"] == server.metric("flying:lent_weight_bytes", "engine")[("0",)] > 0
        watched.page.wait_for_function(TO_SCALE, arg=lent)
        server.layout(APART)
        expect(figures(watched)).to_have_text([WHOLE, WHOLE])
        watched.page.wait_for_function(TO_SCALE, arg=memory(server))
        assert memory(server) == lent | {"lent_bytes": 0}
        server.layout(TOGETHER)
    assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert watched.problems == []
