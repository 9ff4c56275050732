"""The page of the live view: one HTML document with its style and script in it, and no external
parts.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files

STYLES = ("page.css",)
_LAST = "page.js"
"""The script that begins: it calls functions of the others."""
SCRIPTS = (
    *sorted(
        path.name
        for path in files(__package__).iterdir()
        if path.name.endswith(".js") and path.name != _LAST
    ),
    _LAST,
)
"""All scripts that lie here."""


def document(*, needs_key: bool) -> str:
    """Return the page; with `needs_key` it asks for the API key before its first request to the
    server.
    """
    return _parts()[0].replace("@@key@@", "required" if needs_key else "none")


def headers() -> dict[str, str]:
    """Return headers of the page: it may only run its own script and style, and talk to its own
    server.
    """
    _, style, script = _parts()
    return {
        "Content-Security-Policy": f"default-src 'none'; style-src '{style}'; script-src "
        f"'{script}'; "
        "img-src "
        "data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def _parts() -> tuple[str, str, str]:
    """Return the document, and the hashes of its style and its script."""
    style, script = _joined(STYLES), f'\n"use strict";{_joined(SCRIPTS)}'
    text = _read("page.html").replace("@@style@@", style).replace("@@script@@", script)
    return text, _hash(style), _hash(script)


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read(name) for name in names)


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
