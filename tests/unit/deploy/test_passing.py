"""What a replica passes on to its node and back, between a real HTTP server and the messages of an
ASGI server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from flying_deploy.passing import PassingOn
from flying_serving.errors import ServerFailed

WAIT_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Message = dict[str, Any]


@asynccontextmanager
async def node(handler: Handler) -> AsyncIterator[PassingOn]:
    """What passes requests on to an HTTP server on this machine, whose only handler this is."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    passing = PassingOn(f"http://127.0.0.1:{runner.addresses[0][1]}", "a-replica")
    try:
        yield passing
    finally:
        await passing.close()
        await runner.cleanup()


class Asked:
    """One request, as an ASGI server has it. `sent`: the messages of the answer."""

    def __init__(self, path: str, body: Iterable[bytes] = (), root: str = "", **scope: Any) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": root + path,
            "root_path": root,
            "headers": [],
        } | scope
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming = [
            {"type": "http.request", "body": data, "more_body": True} for data in body
        ]
        self._incoming.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive(self) -> Message:
        """The next piece of the body; then nothing, as from a client that waits."""
        if not self._incoming:
            await asyncio.Event().wait()
        return self._incoming.pop(0)

    async def through(self, passing: PassingOn) -> None:
        """Pass the request on."""
        await passing(self.scope, self.receive, self.sent.put)

    async def next(self) -> Message:
        """The next message of the answer."""
        return await asyncio.wait_for(self.sent.get(), WAIT_S)

    def all(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of an answer that is there."""
        start, *rest = [self.sent.get_nowait() for _ in range(self.sent.qsize())]
        assert not rest[-1].get("more_body", False)
        return (
            start["status"],
            start["headers"],
            b"".join(message.get("body", b"") for message in rest),
        )


async def told(request: web.Request) -> web.Response:
    """All that has come."""
    headers = sorted((name.lower(), value) for name, value in request.headers.items())
    body = (await request.read()).decode()
    return web.json_response({"path": request.raw_path, "headers": headers, "body": body})


async def test_a_request_arrives_as_it_was_sent() -> None:
    """Body in pieces, path and query quoted as they were; for another host, and by way of a
    router, of whose clients' addresses it says nothing.
    """
    sent = [(b"host", b"router:8000"), (b"content-length", b"6"), (b"authorization", b"Bearer k")]
    sent += [
        (b"connection", b"keep-alive"),
        (b"expect", b"100-continue"),
        (b"x-forwarded-for", b"127.0.0.1"),
        (b"via", b"1.1 nobody"),
        (b"x-mine", b"1"),
        (b"x-mine", b"2"),
    ]
    asked = Asked(
        "/v1/a b/ü", [b"abc", b"def"], root="/llm", headers=sent, query_string=b"q=%20x&y"
    )
    async with node(told) as passing:
        await asked.through(passing)
    found = json.loads(asked.all()[2])
    assert found["path"] == "/v1/a%20b/%C3%BC?q=%20x&y"
    assert found["body"] == "abcdef"
    host = dict(found["headers"]).pop("host")
    assert host.startswith("127.0.0.1:")
    ours = [
        ["authorization", "Bearer k"],
        ["content-length", "6"],
        ["host", host],
        ["via", "1.1 ray-serve"],
    ]
    assert found["headers"] == [*ours, ["x-mine", "1"], ["x-mine", "2"]]


async def test_an_answer_is_returned_as_it_is() -> None:
    """With its status and headers, but not those of the connection; and with the name of the
    replica.
    """

    async def full(_: web.Request) -> web.Response:
        answer = web.json_response(
            {"error": {"code": 429}}, status=429, headers={"Retry-After": "7"}
        )
        answer.headers.add("X-Two", "1")
        answer.headers.add("X-Two", "2")
        return answer

    asked = Asked("/v1/completions", method="GET")
    async with node(full) as passing:
        await asked.through(passing)
    status, headers, body = asked.all()
    assert status == 429
    assert json.loads(body) == {"error": {"code": 429}}
    assert sorted(headers) == [
        (b"content-length", str(len(body)).encode()),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"retry-after", b"7"),
        (b"x-flying-node", b"a-replica"),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
    ]


class Streaming:
    """An answer of two pieces, the second once `goes_on` is set. `left`: its client has left."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.goes_on, self.left = asyncio.Event(), asyncio.Event()
        self._breaks = breaks

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        try:
            await answer.prepare(request)
            await answer.write(b"data: 1\n\n")
            await self.goes_on.wait()
            if self._breaks:
                assert request.transport is not None
                request.transport.abort()
            else:
                await answer.write(b"data: 2\n\n")
        except asyncio.CancelledError:
            self.left.set()
            raise
        return answer


async def test_a_stream_is_passed_on_piece_by_piece() -> None:
    answer, asked = Streaming(), Asked("/v1/completions")
    async with node(answer.handle) as passing:
        task = asyncio.create_task(asked.through(passing))
        assert (await asked.next())["status"] == 200
        assert (await asked.next())["body"] == b"data: 1\n\n"
        assert asked.sent.empty()
        answer.goes_on.set()
        assert (await asked.next())["body"] == b"data: 2\n\n"
        assert await asked.next() == {"type": "http.response.body", "body": b""}
        await task


async def test_the_node_sees_that_a_client_leaves() -> None:
    """The router cancels the request then."""
    answer, asked = Streaming(), Asked("/v1/completions")
    async with node(answer.handle) as passing:
        task = asyncio.create_task(asked.through(passing))
        await asked.next()
        await asked.next()
        task.cancel()
        await asyncio.wait_for(answer.left.wait(), WAIT_S)


async def test_an_answer_that_breaks_off_is_broken_off() -> None:
    """An exception tells the router so; an end of the body would look like the end of the
    answer.
    """
    answer, asked = Streaming(breaks=True), Asked("/v1/completions")
    async with node(answer.handle) as passing:
        task = asyncio.create_task(asked.through(passing))
        await asked.next()
        await asked.next()
        answer.goes_on.set()
        with pytest.raises(ServerFailed, match="ended in the middle of an answer"):
            await task
    assert asked.sent.empty()


async def test_request_to_a_dead_node_may_be_repeated() -> None:
    async with node(told) as passing:
        pass
    passing = PassingOn(passing._url, "a-replica")
    asked = Asked("/v1/completions")
    await asked.through(passing)
    await passing.close()
    status, headers, body = asked.all()
    assert status == 503
    assert json.loads(body)["error"]["code"] == 503
    assert (b"retry-after", b"1") in headers


@pytest.mark.parametrize("path", ["/flying", "/flying/drain", "/flying/"])
async def test_admin_routes_are_each_nodes_own(path: str) -> None:
    """Any node would get an order that is meant for one."""
    asked = Asked(path, root="/llm")
    async with node(told) as passing:
        await asked.through(passing)
    status, _, body = asked.all()
    assert status == 404
    assert json.loads(body)["error"]["code"] == 404
