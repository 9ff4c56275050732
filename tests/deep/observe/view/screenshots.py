"""The pictures of the live view in docs/: `python -m tests.deep.observe.view.screenshots`.

Two minutes, four engines.

The policy decides: a quiet time, a burst, a time with urgent requests. The load is made up, the
view is not.
"""

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from playwright.sync_api import Browser, Page, ViewportSize

from harness.live import ROOT, Server, tiny
from tests.deep.observe.view.browser import chromium

DOCS = ROOT / "docs"
NAME = "tiny-llama"
SETTINGS = (
    f"--served-model-name={NAME}",
    "--policy=auto",
    "--horizon-s=5",
    "--kv-cache-memory-bytes=8388608",
)
PHASES = ((12.0, 1, False), (12.0, 40, False), (14.0, 2, False), (55.0, 7, True))
"""Seconds, requests at a time, and whether one in six is urgent."""
MIXED = "() => /1.*2|2.*1/.test(document.getElementById('layout').textContent)"
"""Whether there are groups of two and of one engine."""
DESKTOP, PHONE = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=844)


def ask(server: Server, draw: random.Random, urgent: bool) -> None:
    """One request of random length."""
    prompt = [draw.randrange(512) for _ in range(draw.randrange(30, 300))]
    priority = -1 if urgent and draw.random() < 1 / 6 else 0
    server.complete(prompt, max_tokens=draw.randrange(80, 400), ignore_eos=True, priority=priority)


def phase(server: Server, seconds: float, streams: int, urgent: bool) -> None:
    """So many requests at a time for so long."""
    end_s = time.monotonic() + seconds

    def stream(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end_s:
            ask(server, draw, urgent)

    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(stream, range(streams)))


def opened(browser: Browser, server: Server, size: ViewportSize, scheme: str, scale: int) -> Page:
    """The view in a tab of its own."""
    context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=scale)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{server.url}/flying/")
    return page


def main() -> None:
    """Take both pictures."""
    argparse.ArgumentParser(
        "python -m tests.deep.observe.view.screenshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    model = tiny("llama")
    with Server(model, 4, *SETTINGS) as server, chromium() as browser, ExitStack() as stack:
        server.model = NAME
        desktop = opened(browser, server, DESKTOP, "dark", 1)
        phone = opened(browser, server, PHONE, "light", 2)
        traffic = stack.enter_context(ThreadPoolExecutor(1)).submit(
            lambda: [phase(server, *each) for each in PHASES]
        )
        desktop.wait_for_timeout(1e3 * (sum(seconds for seconds, _, _ in PHASES[:-1]) + 10))
        desktop.wait_for_function(MIXED, timeout=1e3 * (PHASES[-1][0] - 12))
        desktop.wait_for_timeout(1500)
        desktop.screenshot(path=DOCS / "view-desktop.png", full_page=True)
        phone.screenshot(path=DOCS / "view-phone.png", full_page=True)
        if traffic.exception() is not None:
            raise RuntimeError(server.log()[-20_000:]) from traffic.exception()


if __name__ == "__main__":
    main()
