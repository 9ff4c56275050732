"""Bodies of requests: their length, their time and the memory of all together have bounds. The gate
reads most of them; an admin route reads its own.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import HTTPException, Request
from pydantic_core import from_json
from starlette.types import Receive

from flying_serving.server.http.incoming import ADMIN, Incoming

MAX_BODY_BYTES = 16 * 1024
"""The most bytes of an order; a layout of eight engines, with spaces and line breaks, has some
hundred.
"""
BODY_DEADLINE_S = 60.0
"""Seconds within which a whole body has to come: 16 MiB at 2.3 Mbit/s."""
LEAST_HELD_BYTES = 2**30
LEAST_HELD_BODIES = 64
"""The bodies of all open requests together may have LEAST_HELD_BYTES, or as many bytes as this
number of longest bodies, if that is more.
"""


class Bodies:
    """The bodies of requests to the routes of vLLM.

    `max_body_bytes`: the most bytes of one body. A body counts as held from its first byte until
    its request ends, as the application keeps it that long.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._most_held_bytes = max(LEAST_HELD_BYTES, LEAST_HELD_BODIES * max_body_bytes)
        self._held_bytes = 0

    async def read(self, request: Incoming) -> None:
        """Read the whole body of a POST to a route. It is held until `release`, also if it is
        refused.

        An admin route reads its own body, once its client is known to be allowed.

        Raises:
            HTTPException: 413 for a body that is too long, 408 too slow; 429 while the bodies of
                other requests leave no memory for it.
        """

        def hold(count: int) -> None:
            if self._held_bytes + count > self._most_held_bytes:
                bound = f"may have {self._most_held_bytes} bytes together"
                raise HTTPException(429, f"body: bodies of open requests {bound}: try again later")
            self._held_bytes += count
            request.held_bytes += count

        is_post = request.is_http and request.scope["method"] == "POST"
        if is_post and not request.path.startswith(ADMIN) and request.has_route:
            most, flag = self._max_body_bytes, " (--max-body-bytes)"
            request.replace_body(await _read(request.receive, request.headers, most, flag, hold))

    def release(self, request: Incoming) -> None:
        """Free what a request holds, when it has ended."""
        self._held_bytes -= request.held_bytes
        request.held_bytes = 0


async def read_json(request: Request) -> Any:
    """Return the body of an order as JSON. Nothing is read before this is called, and little more
    than MAX_BODY_BYTES then.

    FastAPI would read and parse the body of a route that declares one before it calls the route's
    dependencies.

    Raises:
        HTTPException: 413 if the body is too long, 408 if it is too slow; 400 if it ends too early
            or is no JSON.
    """
    return parse_json(await _read(request.receive, request.headers, MAX_BODY_BYTES))


def parse_json(content: bytes) -> Any:
    """Return JSON as Python objects. They are nested less deeply than the stack allows, as the
    parser has a limit (200 levels).

    Raises:
        HTTPException: 400 with the parser's reason.
    """
    try:
        return from_json(content)
    except ValueError as error:
        raise HTTPException(400, f"body: JSON decode error: {error}") from None


def _hold_nothing(count: int) -> None:
    """Take no memory for bytes. Orders need none: their senders are allowed, and they are short."""


async def _read(
    receive: Receive,
    headers: Mapping[str, str],
    most: int,
    flag: str = "",
    hold: Callable[[int], None] = _hold_nothing,
) -> bytes:
    """Read the body, at most `most` bytes; one whose Content-Length is larger is refused unread.

    Raises:
        HTTPException: 400, 408, 413 or 429, saying what is allowed.
    """
    says = f"body: must be at most {most} bytes long{flag}, is"
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:18]) > most:
        raise HTTPException(413, f"{says} {length[:18]}")
    content, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(400, "body: the client has left before its end")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                if len(content) + len(chunk) > most:  # Content-Length may be wrong
                    raise HTTPException(413, f"{says} {len(content) + len(chunk)} or longer")
                hold(len(chunk))
                content += chunk
    except TimeoutError:
        problem = f"must have come within {BODY_DEADLINE_S:g} s"
        raise HTTPException(408, f"body: {problem}") from None
    return bytes(content)
