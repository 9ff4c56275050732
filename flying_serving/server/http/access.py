"""Access to routes. With an API key, its holders may use them; without one, only this machine may
use admin routes.
"""

import hmac
import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from flying_serving.server.http.app_state import keys_of
from flying_serving.server.http.incoming import Incoming

FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip", "via")
"""Headers with which a proxy says that a request is another machine's. A request with one is not
local.

They can only take a right away. `flying-serving serve` has uvicorn believe none of them.
"""
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that vLLM leaves open outside `/v1` and its other guarded prefixes. No route generates or
changes anything by them.
"""
OPEN = ("/ping", "/tokenize", "/detokenize")
"""Routes that vLLM leaves open and that take other methods, but run nothing in an engine."""
_SET_KEY = "without an API key (--api-key, VLLM_API_KEY) the admin routes"


async def check_key(request: Incoming) -> None:
    """Raise HTTPException (401) for a request that may change something and lacks the server's API
    key, if there is one.

    vLLM asks for its key by the beginning of a path, which leaves `/invocations` and the routes of
    its dev mode open.
    """
    keys = keys_of(request.app)
    if keys and not is_open(request) and not has_key(request.headers, keys):
        raise HTTPException(HTTPStatus.UNAUTHORIZED, "Unauthorized")


def is_open(request: Incoming) -> bool:
    """Return whether a request needs no API key where vLLM itself does not ask for one. A websocket
    always needs it.
    """
    return request.is_http and (request.scope["method"] in READING or request.path in OPEN)


def has_key(headers: Mapping[str, str], keys: list[str]) -> bool:
    """Return whether a request has one of the API keys, as a bearer token."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and any(
        hmac.compare_digest(token.encode(), key.encode()) for key in keys
    )


async def authorise(request: Request) -> None:
    """Check the server's API key for an admin route, also for one that only reads.

    Raises:
        HTTPException: 401 without the key, if there is one; 403 as `refuse_others`.
    """
    await refuse_others(request)
    keys = keys_of(request.app)
    if keys and not has_key(request.headers, keys):
        raise HTTPException(401, "Unauthorized")


async def refuse_others(request: Request) -> None:
    """Without an API key, raise HTTPException (403) for requests of other machines, and of pages of
    other sites.

    A page of another site may have a name that resolves to this machine's address (DNS rebinding).
    Its browser then takes our answers for its own site's, but the request's `Host` says where it
    was sent.
    """
    if keys_of(request.app):
        return
    if not is_local(request.scope, request.headers):
        raise HTTPException(403, f"{_SET_KEY} answer this machine alone")
    origin = request.headers.get("origin")
    if origin is not None and not _is_loopback(_host(origin)):
        raise HTTPException(403, f"{_SET_KEY} answer no pages of other sites")
    if not _is_sent_to_us(request):
        host = reprlib.repr(request.headers.get("host", ""))
        raise HTTPException(
            403, f"Host={host}: {_SET_KEY} answer to localhost, loopback addresses and --host alone"
        )


def _is_sent_to_us(request: Request) -> bool:
    """Return whether a local request names this machine by its own name; on a unix socket every
    name is right.
    """
    if _is_unix(request.scope):
        return True
    host = _host(f"//{request.headers.get('host', '')}")
    return _is_loopback(host) or (
        host is not None and host == getattr(request.app.state.args, "host", None)
    )


def is_local(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Return whether a request is from this machine, by its peer's address, and not forwarded by a
    proxy here.

    A peer may be unknown: of a unix socket, and of a TCP connection that was reset before it was
    looked at.
    """
    if any(name in headers for name in FORWARDED):
        return False
    if _is_unix(scope):  # its directory says who may connect
        return True
    peer = scope.get("client")
    return peer is not None and _is_loopback(peer[0])


def _is_unix(scope: Mapping[str, Any]) -> bool:
    """Return whether uvicorn listens on a unix socket: its address has no port."""
    _, port = scope.get("server") or (None, 0)
    return port is None


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
