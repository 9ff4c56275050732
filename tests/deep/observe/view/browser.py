"""A headless Chromium for tests, and what a page in it did."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)

TO_SCALE = """memory => Array.from(document.querySelectorAll(".engine")).every((tile) => {
    const { weight_bytes: weights, kv_bytes: own, lent_bytes: lent } = memory;
    const part = (name) => tile.querySelector(name).getBoundingClientRect();
    const all = tile.getBoundingClientRect();
    const near = (pixels, bytes) => Math.abs(pixels - all.height * bytes / (weights + own)) < 1;
    return near(part(".weights").height, weights - lent)
        && (!lent || near(part(".loan").height, lent)
            && Math.abs(part(".loan").top - part(".weights").bottom) < 1);
})"""
"""Whether each tile's weights, and what they have lent, are as large in it as they are in memory,
in its place.
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; the test fails with what to install if it is not there."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail(
            "chromium is not installed: apt-get install --no-install-recommends chromium (see "
            ".ci/packages)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        try:
            favour(browser)
            yield browser
        finally:
            browser.close()


def favour(browser: Browser) -> None:
    """Let the browser have its share of the processors while engines take all that there is, if
    that is allowed.

    It is a session of its own, and Linux gives each session ("autogroup") its share on each
    processor by itself: one with little to do was seen to wait 5 s for the other session's engines.
    Root may give a session a nice value.
    """
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    (pid,) = [process["id"] for process in processes if process["type"] == "browser"]
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-10")


@dataclass
class Watched:
    """A page, what it has written to its console or failed at, and the addresses that it has asked
    for.
    """

    page: Page
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on(
            "console", lambda message: self.problems.append(f"{message.type}: {message.text}")
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.context.on("request", lambda request: self.asked.append(request.url))

    def looks(self) -> int:
        """How often it has asked for the server's state."""
        return sum(url.endswith("/flying/view") for url in self.asked)
