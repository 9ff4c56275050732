"""The site as `make docs` builds it, in a browser on a desk and on a phone."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Page, Response, ViewportSize, expect

from harness.live import ROOT
from tests.deep.observe.view.browser import Watched, chromium

BUILD_S = 240.0
WITHIN_MS = 30_000
SIZES = {
    "desk": ViewportSize(width=1440, height=900),
    "phone": ViewportSize(width=390, height=844),
}
FITS = "() => document.documentElement.scrollWidth <= window.innerWidth"
"""Whether the page is no wider than the screen. Wide tables and code scroll by themselves."""
DRAWN = "() => Array.from(document.images).every(one => one.complete && one.naturalWidth > 0)"


def uris(entries: list[Any]) -> Iterator[str]:
    """Yield the pages of a part of the menu."""
    for entry in entries:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(target, list):
            yield from uris(target)
        else:
            yield target.removesuffix(".md") + ".html"


MENU = list(uris(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


class Quiet(SimpleHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the site, and what its program has written."""
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> Iterator[str]:
    """The address of the site."""
    handler = partial(Quiet, directory=str(built[0]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(params=SIZES)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page on a screen of one size."""
    context = browser.new_context(viewport=SIZES[request.param])
    yield context.new_page()
    context.close()


def test_the_site_is_built_without_a_warning(built: tuple[Path, str]) -> None:
    assert not re.findall("^WARNING.*$", built[1], re.MULTILINE)
    assert {path for path in MENU if not (built[0] / path).exists()} == set()


def test_each_page_fits_its_screen_and_asks_no_one_else(site: str, page: Page) -> None:
    watched, failed = Watched(page), list[str]()

    def answered(response: Response) -> None:
        if response.status >= 400:
            failed.append(response.url)

    page.on("response", answered)
    wide, undrawn = [], []
    for uri in MENU:
        page.goto(f"{site}/{uri}", wait_until="load")
        wide += [] if page.evaluate(FITS) else [uri]
        undrawn += [] if page.evaluate(DRAWN) else [uri]
    assert (wide, undrawn, failed, watched.problems) == ([], [], [], [])
    assert [url for url in watched.asked if not url.startswith((site, "data:"))] == []


def test_a_search_finds_a_page_and_opens_it(site: str, browser: Browser) -> None:
    context = browser.new_context(viewport=SIZES["desk"])
    page = context.new_page()
    page.goto(f"{site}/index.html")
    page.get_by_role("textbox", name="Search").fill("urgent requests")
    found = page.locator(".md-search-result__link").first
    expect(found).to_be_visible(timeout=WITHIN_MS)
    found.click()
    expect(page.locator("h1").first).to_be_visible(timeout=WITHIN_MS)
    assert "index.html" not in page.url
    context.close()
