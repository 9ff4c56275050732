"""An ASGI application that passes requests on to a node and its answers back, chunk by chunk."""

from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from flying_serving.errors import ServerFailed
from flying_serving.server.http.access import FORWARDED
from flying_serving.server.http.error_body import error_body

ADMIN = "/flying/"
RETRY_AFTER_S = 1
VIA = "1.1 ray-serve"
"""With this header a request is not one of the node's own machine, for which admin routes need no
key.
"""
NODE_HEADER = "x-flying-node"
"""The header of each answer with the replica whose node gave it."""
KEEP_ALIVE_S = 1.0
"""An idle connection is not used again after this: the node closes it after five seconds, and may
be about to.
"""
_HOP = (
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
)
_HOP_BY_HOP = {*_HOP, "transfer-encoding", "upgrade"}
_NOT_SENT = {*_HOP_BY_HOP, *FORWARDED, "host", "expect"}
"""Also nothing that a client says of addresses, which the node could take for the router's word."""
_NOT_RETURNED = {name.encode() for name in (*_HOP_BY_HOP, "date", "server")}
"""Headers that the router adds itself."""
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the client does not add."""


class PassingOn:
    """Passes HTTP requests on to the node at `url`. `name`: of the replica. To be made in an event
    loop.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._named = {NODE_HEADER: name}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections to the node."""
        await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. If it is cancelled, as when its client leaves, the node sees that
        its client leaves.

        Raises:
            ServerFailed: if the node ends in the middle of an answer, so that the router breaks it
                off.
        """
        request = Request(scope, receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if f"{path}/".startswith(ADMIN):
            told = f"{ADMIN} is each node's own: ask the node, on its machine"
            refusal = JSONResponse(error_body(told, HTTPStatus.NOT_FOUND), 404, self._named)
            await refusal(scope, receive, send)
            return
        try:
            answer = await self._ask(request, path)
        except aiohttp.ClientConnectionError:
            body = error_body(
                "the node has ended: send the request again, for another",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
            refusal = JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S)} | self._named)
            await refusal(scope, receive, send)
            return
        try:
            await self._return(answer, send)
        except aiohttp.ClientError as error:
            raise ServerFailed(f"the node has ended in the middle of an answer: {error}") from None
        finally:
            answer.close()

    async def _ask(self, request: Request, path: str) -> aiohttp.ClientResponse:
        """Send the request; the answer has its headers."""
        query = request.scope.get("query_string", b"").decode("latin-1")
        url = URL(f"{self._url}{quote(path)}{'?' if query else ''}{query}", encoded=True)
        headers = [
            (name, value) for name, value in request.headers.items() if name not in _NOT_SENT
        ]
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        data = request.stream() if has_body else None
        return await self._http.request(
            request.method, url, headers=[*headers, ("via", VIA)], data=data, allow_redirects=False
        )

    async def _return(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        headers = _returned(answer.raw_headers)
        headers += [(name.encode(), value.encode()) for name, value in self._named.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for data in answer.content.iter_any():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _returned(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lower if name not in _NOT_RETURNED]
