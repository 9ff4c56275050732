"""The page: complete in itself, nothing in it runs or is fetched, every number of the summary is
there.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from flying_lab.bench.report import page
from flying_lab.bench.report.load import MeasuredSystem
from tests.unit.lab.bench.report.systems import system

PAIR = [system("static-dp", lost=2), system("auto", 20.0, 50.0)]
FETCHED = ("src", "data", "action", "poster", "srcset", "background", "xlink:href", "href")


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data


@pytest.fixture(scope="module")
def text() -> str:
    """Return a page."""
    return page.render(PAIR)


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    """Return it, parsed."""
    return Reader(text)


def test_page_fetches_no_address_and_runs_no_script(read: Reader, text: str) -> None:
    """References are to the page itself; the only addresses are names of XML namespaces."""
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & {
        tag for tag, _ in read.tags
    }
    for _, attributes in read.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert all(attributes[name].startswith("#") for name in FETCHED if name in attributes)
        assert not any(
            "//" in value for name, value in attributes.items() if not name.startswith("xmlns")
        )
    assert "@import" not in read.text and not re.search(r"url\((?!#)", text)


def test_ids_are_unique_and_references_find_theirs(read: Reader, text: str) -> None:
    """Several figures are on the page."""
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 100
    used = [
        attributes["xlink:href"][1:] for _, attributes in read.tags if "xlink:href" in attributes
    ]
    used += re.findall(r"url\(#([^)]*)\)", text)
    assert used and set(used) <= set(ids)
    assert sum(tag == "svg" for tag, _ in read.tags) == len(page.FIGURES)


def test_numbers_switches_commands_and_warnings_are_there(read: Reader) -> None:
    """And the best of each column is marked."""
    shown = " ".join(read.text.split())
    assert "serve 'a b'" in shown and "ready after 12.0 s" in shown
    assert "Switches of auto: 2" in shown and "20.00" in shown and "50.00" in shown
    assert "static-dp: 2 unfinished of 40 requests. 2 x took <longer>" in shown
    assert "38/40" in shown and "40/40" in shown
    assert "goodput" not in shown  # no system has one
    assert sum(attributes.get("class") == "best" for _, attributes in read.tags) >= 6


def test_names_are_escaped_as_text() -> None:
    """A workload may be called anything."""
    odd = PAIR[0]
    run = msgspec.structs.replace(
        odd.results.run, workload="<script>alert(1)</script>", model='"><img src=x>'
    )
    shown = page.render(
        [MeasuredSystem("<b>", type(odd.results)(run, odd.results.table), odd.summary)]
    )
    assert not {"script", "img", "b"} & {tag for tag, _ in Reader(shown).tags}


def test_different_workloads_are_told() -> None:
    """So is a client that fell behind, a clock that was set, and a log that does not reach back to
    the start.
    """
    one, other = PAIR
    run = msgspec.structs.replace(
        other.results.run, workload="other", p99_loop_lag_ms=80.0, wall_drift_s=-0.7
    )
    assert other.log is not None
    log = msgspec.structs.replace(other.log, switches=other.log.switches[1:])
    changed = MeasuredSystem(
        "short", type(other.results)(run, other.results.table), other.summary, log
    )
    text = " ".join(page._warnings([one, changed]))
    assert "did not replay the same workload" in text
    assert "short: the client fell behind by 80.0 ms" in text
    assert "short: the clock was set by -0.70 s" in text
    assert "short: its log begins 50.0 s after the replay" in text


def test_a_long_log_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_SWITCHES", 1)
    assert "1 more are in its switches.json" in page.render(PAIR)


def test_page_is_written_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "render", lambda systems: "<p>–</p>")
    assert page.write(PAIR, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_bytes() == "<p>–</p>".encode()
