"""The site has the pages that it names, and links stay inside of it."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from supply.pins import ROOT
from supply.site import API, API_PAGE, OUTSIDE, api, linked, outside

DOCS = ROOT / "docs"
NAV = re.compile(r"[\w/]+\.md")
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def places() -> set[str]:
    """Every page and file of the site."""
    inside = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()}
    return inside | {path.relative_to(ROOT).as_posix() for path in outside()} | {API_PAGE}


def pages() -> dict[str, str]:
    """The text of each page that is written, by its place in the site."""
    found = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
    found |= {path.relative_to(ROOT).as_posix(): path for path in outside() if path.suffix == ".md"}
    return {uri: path.read_text(encoding="utf-8") for uri, path in found.items()}


def test_the_navigation_names_pages_that_there_are() -> None:
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = NAV.findall(yaml.safe_dump(found["nav"]))
    assert len(named) > 20
    assert set(named) <= places()
    assert {path.name for path in DOCS.glob("*.md")} <= set(named)


def test_every_link_upwards_stays_in_the_site() -> None:
    lost = []
    for uri, text in pages().items():
        for link in LINK.findall(linked(text, uri)):
            there = (Path("/site") / uri).parent.joinpath(link).resolve()
            if there.relative_to("/site").as_posix() not in places():
                lost.append(f"{uri}: {link}")
    assert not lost


@pytest.mark.parametrize(
    ("uri", "link", "shown"),
    [
        ("benchmarks.md", "../experiments/plans/live.md", "experiments/plans/live.md"),
        ("design/licences.md", "../../LICENSE", "../LICENSE"),
        ("lab/results/fig8.md", "../../design/engine.md", "../../design/engine.md"),
        (
            "experiments/plans/loads.md",
            "../../docs/lab/results/loads.md",
            "../../lab/results/loads.md",
        ),
    ],
)
def test_a_link_names_the_place_in_the_site(uri: str, link: str, shown: str) -> None:
    assert linked(f"[text]({link})", uri) == f"[text]({shown})"


def test_the_reference_names_what_can_be_imported() -> None:
    names = [name for named in API.values() for name in named]
    assert all(f"\n::: {name}\n" in api() for name in names)
    for name in names:
        module, _, last = name.rpartition(".")
        if last[0].isupper():
            assert hasattr(importlib.import_module(module), last)
        else:
            importlib.import_module(name)
    assert len(OUTSIDE) == 3
