"""Bodies of requests to the admin routes: read up to a bound, once the request is known to be allowed."""

import json
from typing import Any

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

MAX_BODY_BYTES = 16 * 1024
"""A layout of eight engines, with spaces and line breaks, has some hundred."""
MAX_BODY_DEPTH = 8
"""Lists and objects within each other; an order has three."""


async def read_json(request: Request) -> Any:
    """The body as JSON. Nothing is read before this is called, and little more than MAX_BODY_BYTES then.

    FastAPI would read and parse the body of a route that declares one before it calls what the route depends on.

    Raises:
        HTTPException: 413 if the body is too long; 400 if it is no JSON, is nested too deeply, or ends too early.
    """
    content = await _read(request)
    try:
        body = json.loads(content)
        too_deep = _depth(body) > MAX_BODY_DEPTH
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise HTTPException(400, f"body: JSON decode error: {error}") from None
    if too_deep:
        raise HTTPException(400, f"body: must be nested at most {MAX_BODY_DEPTH} deep")
    return body


async def _read(request: Request) -> bytes:
    content = bytearray()
    try:
        async for chunk in request.stream():  # whatever Content-Length says
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise HTTPException(413, f"body: must be at most {MAX_BODY_BYTES} bytes long")
    except ClientDisconnect:
        raise HTTPException(400, "body: the client has left before its end") from None
    return bytes(content)


def _depth(body: object) -> int:
    """How many lists and objects are within each other; without recursion, however many they are."""
    depth, level = 0, [body]
    while level := [value for value in level if isinstance(value, list | dict)]:
        depth += 1
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return depth
