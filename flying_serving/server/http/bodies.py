"""Bodies of requests, with bounds. The gate reads most of them; an admin route reads its own."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from starlette.types import Receive

from flying_serving.server.http.body_room import BodyRooms, Grow, address_of
from flying_serving.server.http.incoming import ADMIN, Incoming
from flying_serving.server.http.pace import chunks

MAX_BODY_BYTES = 16 * 1024
"""The most bytes of an order; a layout of eight engines, with spaces and line breaks, has some
hundred.
"""
MAX_BODY_DEPTH = 8
"""The deepest nesting of lists and objects in an order; a layout has three levels."""
MAX_REQUEST_DEPTH = 100
"""The deepest nesting in other bodies. Python's stack has room for 1,000 calls, and vLLM's checks
make several for each level.
"""
_ESCAPE, _TEXT = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"?')
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_NO_BRACKET = bytes(set(range(256)) - set(b"[{]}"))


class Bodies:
    """The bodies of requests to the routes of vLLM. `max_body_bytes`: the most bytes of one
    body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._rooms = BodyRooms(max_body_bytes)

    async def check(self, request: Incoming) -> None:
        """Read the whole body of a POST to a route.

        An admin route reads its own body, once its client is known to be allowed.

        Raises:
            HTTPException: 413 for a body that is too long, 400 too deep, 408 too slow; 429 while
                many bodies are being read.
        """
        is_post = request.is_http and request.scope["method"] == "POST"
        if not is_post or request.path.startswith(ADMIN) or not request.has_route:
            return
        headers, most = request.headers, self._max_body_bytes
        with self._rooms.held(address_of(request.scope)) as grow:
            body = await _read(request.receive, headers, most, " (--max-body-bytes)", grow)
        if not headers.get("content-type", "").startswith("multipart/"):
            _check_depth(body, MAX_REQUEST_DEPTH)
        request.replace_body(body)


async def read_json(request: Request) -> Any:
    """Return the body of an order as JSON. Nothing is read before this is called, and little more
    than MAX_BODY_BYTES then.

    FastAPI would read and parse the body of a route that declares one before it calls the route's
    dependencies.

    Raises:
        HTTPException: 413 if the body is too long; 400 if it is no JSON, is nested too deeply, or
            ends too early.
    """
    content = await _read(request.receive, request.headers, MAX_BODY_BYTES)
    _check_depth(content, MAX_BODY_DEPTH)
    try:
        return json.loads(content)
    except ValueError as error:
        raise HTTPException(400, f"body: JSON decode error: {error}") from None


def _accept_any(length: int) -> None:
    """Accept any length. Bodies of orders need no room: their senders are allowed, and they are
    short.
    """


async def _read(
    receive: Receive,
    headers: Mapping[str, str],
    most: int,
    flag: str = "",
    grow: Grow = _accept_any,
) -> bytes:
    """Read the body, at most `most` bytes; one whose Content-Length is larger is refused unread.

    Raises:
        HTTPException: 400, 408, 413 or 429, saying what is allowed.
    """
    says = f"body: must be at most {most} bytes long{flag}, is"
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:18]) > most:
        raise HTTPException(413, f"{says} {length[:18]}")
    content = bytearray()
    async for chunk in chunks(receive):  # Content-Length may be wrong
        if len(content) + len(chunk) > most:
            raise HTTPException(413, f"{says} {len(content) + len(chunk)} or longer")
        content += chunk
        grow(len(content))
    return bytes(content)


def _check_depth(content: bytes, most: int) -> None:
    if is_deeper(content, most):
        raise HTTPException(400, f"body: must be nested at most {most} deep")


def is_deeper(content: bytes, most: int) -> bool:
    """Return whether lists and objects nest more than `most` deep, in the part of the text that is
    JSON.

    Works without recursion, without a parser, which would build all of it, and in time linear in
    its length.
    """
    text = _as_utf8(content)
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    if b"\\" in text:
        text = _ESCAPE.sub(b"", text)
    brackets = np.frombuffer(_TEXT.sub(b"", text).translate(None, _NO_BRACKET), dtype=np.uint8)
    depths = np.cumsum(_STEPS[brackets], dtype=np.int32)
    return bool(depths.max(initial=0) > most)


def _as_utf8(content: bytes) -> bytes:
    """Return JSON as UTF-8. JSON's parser takes UTF-16 and UTF-32 too, in which a bracket is not
    one byte.
    """
    encoding = json.detect_encoding(content)
    if encoding.startswith("utf-8"):
        return content
    try:
        return content.decode(encoding, "surrogatepass").encode(errors="surrogatepass")
    except UnicodeError:
        return content
