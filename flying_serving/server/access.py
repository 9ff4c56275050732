"""Who may use the admin routes: those who have the API key. Without one, programs of this machine alone."""

import hmac
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip", "via")
"""Headers with which a proxy says that a request is another machine's: from that proxy it does not count as local.

They can only take a right away. uvicorn believes `X-Forwarded-For` of the proxies that `FORWARDED_ALLOW_IPS` names.
"""
_SET_KEY = "without an API key (--api-key, VLLM_API_KEY) the admin routes"


async def authorise(request: Request) -> None:
    """The server's API key guards the admin routes too: vLLM's middleware guards /v1 and others by prefix.

    Raises:
        HTTPException: 401 without the key, if there is one; else as `refuse_others`.
    """
    await refuse_others(request)
    keys = keys_of(request)
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if keys and not (
        scheme.lower() == "bearer" and any(hmac.compare_digest(token.encode(), key.encode()) for key in keys)
    ):
        raise HTTPException(401, "Unauthorized")


async def refuse_others(request: Request) -> None:
    """Raise HTTPException (403) if there is no API key and the request is another machine's, or another site's."""
    if keys_of(request):
        return
    if not is_local(request.scope, request.headers):
        raise HTTPException(403, f"{_SET_KEY} answer this machine alone")
    origin = request.headers.get("origin")
    if origin is not None and not _is_loopback(_host(origin)):
        raise HTTPException(403, f"{_SET_KEY} answer no pages of other sites")


def keys_of(request: Request) -> list[str]:
    """The API keys of the server, none if it asks for none."""
    return [key for key in (request.app.state.flying_keys or ()) if key]


def is_local(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether the connection is from this machine, by its peer's address, and none that a proxy here forwards.

    A peer may be unknown: of a unix socket, and of a TCP connection that was reset before it was looked at.
    """
    if any(name in headers for name in FORWARDED):
        return False
    _, port = scope.get("server") or (None, 0)
    if port is None:  # uvicorn listens on a unix socket, whose directory says who may connect
        return True
    peer = scope.get("client")
    return peer is not None and _is_loopback(peer[0])


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
