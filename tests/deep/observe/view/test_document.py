"""The page as it is sent: whole in itself, and allowed to do nothing but show its server."""

import base64
import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from flying_serving.observe.view import page


def test_document_names_no_outside_address() -> None:
    """No address but that of the SVG name space, no import, no url()."""
    text = page.document(needs_key=False)
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"url\(|@import|\bimport\b|<link(?! rel=\"icon\" href=\"data:)|\bsrc=", text
    )
    assert "@@" not in text


@pytest.mark.parametrize(("tag", "directive"), [("style", "style-src"), ("script", "script-src")])
def test_its_own_style_and_script_are_all_that_may_run(tag: str, directive: str) -> None:
    """The policy has the hash of what the document holds, whether it asks for a key or not."""
    for needs_key in (False, True):
        (inside,) = re.findall(
            rf"<{tag}>(.*?)</{tag}>", page.document(needs_key=needs_key), re.DOTALL
        )
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        policy = page.headers()["Content-Security-Policy"].split("; ")
        assert f"{directive} 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_its_script_is_strict() -> None:
    """The word counts only as the first statement of the whole script."""
    (script,) = re.findall(r"<script>(.*?)</script>", page.document(needs_key=False), re.DOTALL)
    assert script.lstrip().startswith('"use strict";')


def test_data_is_written_as_text() -> None:
    """Names and reasons come from outside: none of them is ever read as HTML."""
    text = page.document(needs_key=False)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text
    )


def test_the_files_are_packaged() -> None:
    """Each is matched by the package data that an installation takes along."""
    root = Path(__file__).parents[4]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    package = Path(str(files("flying_serving")))
    packaged = {path for pattern in patterns["flying_serving"] for path in package.glob(pattern)}
    names = {"page.html", *page.STYLES, *page.SCRIPTS}
    assert {package / "observe" / "view" / name for name in names} <= packaged
    assert {
        p.name
        for p in (package / "observe" / "view").iterdir()
        if p.suffix in (".html", ".css", ".js")
    } == names
