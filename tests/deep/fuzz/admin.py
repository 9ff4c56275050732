"""Requests to the admin routes: schemathesis makes them from the server's OpenAPI document, and we
make some more.
"""

import json
from collections.abc import Mapping
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.generation.modes import GenerationMode

from flying_serving.config import MODES
from tests.deep.fuzz.bodies import encode, junk, text
from tests.deep.fuzz.drawing import JSON, Sent

PREFIX = "/flying"
LAYOUT = f"{PREFIX}/layout"
LAYOUTS = ([[0], [1]], [[0, 1]])
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD")
_header = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12).map(str.strip)
_order = st.fixed_dictionaries(
    {"groups": st.sampled_from(LAYOUTS) | junk},
    optional={
        "mode": st.sampled_from(MODES) | junk,
        "weave_steps": st.integers(-1, 1001) | junk,
        "x": junk,
    },
)
orders = st.one_of(_order, _order, _order, junk)


def admin_requests(document: Mapping[str, Any]) -> st.SearchStrategy[Sent]:
    """Requests to each operation below /flying, as its schema allows, as it does not, and beside
    it.
    """
    ours = {path: item for path, item in document["paths"].items() if path.startswith(PREFIX)}
    schema = schemathesis.openapi.from_dict({**document, "paths": ours})
    found: list[st.SearchStrategy[Any]] = [
        result.ok().as_strategy(generation_mode=mode)
        for result in schema.get_all_operations()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or result.ok().body
    ]
    by_schema = st.one_of(found).map(_sent)
    return by_schema | _orders() | _beside(sorted(ours))


def _sent(case: Any) -> Sent:
    """What schemathesis would send."""
    if isinstance(case.body, bytes):
        content = case.body
    else:
        content = b"" if case.media_type is None else json.dumps(case.body).encode()
    return Sent(case.formatted_path, content, case.media_type or "", case.method)


@st.composite
def _orders(draw: st.DrawFn) -> Sent:
    """Orders that are right but for some of their fields, or for their form."""
    content = encode(draw(orders))
    match draw(st.integers(0, 19)):
        case 0:
            content = content[: draw(st.integers(0, len(content)))]
        case 1:
            content = content.decode().encode(
                draw(st.sampled_from(["utf-16", "utf-32-le", "utf-8-sig", "utf-16-be"]))
            )
        case 2:
            content = content.ljust(draw(st.integers(16_000, 17_000)))
    return Sent(LAYOUT, content)


@st.composite
def _beside(draw: st.DrawFn, paths: list[str]) -> Sent:
    """Methods, paths, query strings, content types and headers that a route does not expect."""
    path = draw(st.sampled_from(paths))
    if not draw(st.integers(0, 3)):
        path += draw(st.sampled_from(["/", "//", "/../status", "%00", "%2f", ".", "\u00e9"]))
    if draw(st.booleans()):
        path += "?" + draw(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20))
    names = st.sampled_from(
        ["Authorization", "Accept", "Range", "If-None-Match", "X-Request-Id", "Host", "Origin"]
    )
    headers = draw(st.lists(st.tuples(names, _header), max_size=2, unique_by=lambda one: one[0]))
    content_type = draw(
        st.sampled_from([JSON, "", "text/plain", "multipart/form-data", "application/x+json"])
    )
    content = draw(
        st.sampled_from([b"", b"{}", b"null"]) | st.binary(max_size=20) | text.map(encode)
    )
    return Sent(
        path.replace("#", ""), content, content_type, draw(st.sampled_from(METHODS)), tuple(headers)
    )
