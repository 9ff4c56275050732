"""Bodies of requests to vLLM's routes: read up to a bound, in bounded time and memory."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from flying_serving.server.http import bodies, refusals
from flying_serving.server.http.bodies import read_json
from tests.with_vllm.server.apps import gated

MOST = 4096


async def whole(request: Request) -> bytes:
    """Read a body as vLLM's routes do."""
    return await request.body()


def app(root_path: str = "", reads: Callable[[Request], Awaitable[Sized]] = whole) -> FastAPI:
    """Return an app behind the gate whose only route answers with the length of what it reads."""
    made = gated(max_body_bytes=MOST)
    made.root_path = root_path

    async def read(request: Request) -> int:
        return len(await reads(request))

    for path in ("/v1/completions", "/flying/x"):
        made.add_api_route(path, read, methods=["POST", "GET"])
    return made


async def post(
    content: Any, path: str = "/v1/completions", root_path: str = "", **headers: str
) -> httpx.Response:
    """Return the answer to a body."""
    transport = httpx.ASGITransport(app(root_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://test:8000") as client:
        return await client.post(
            path, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


def message(answer: httpx.Response, status: int) -> str:
    """Return what a refusal with this status says."""
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


async def chunks(count: int, taken: list[int]) -> AsyncIterator[bytes]:
    """Yield chunks of 1,024 bytes, without a Content-Length; `taken` gets a number for each."""
    for number in range(count):
        taken.append(number)
        yield b" " * 1024


async def test_a_body_up_to_the_bound_reaches_its_route() -> None:
    for length in (0, 1, MOST):
        assert (await post(b" " * length)).json() == length
    assert (await post(chunks(4, []))).json() == MOST


async def test_a_body_that_says_that_it_is_too_long_is_not_read() -> None:
    """The answer names the limit, its flag, and the length."""
    taken: list[int] = []
    answer = await post(chunks(1000, taken), Content_Length="1024000")
    assert (
        message(answer, 413)
        == "body: must be at most 4096 bytes long (--max-body-bytes), is 1024000"
    )
    assert taken == []
    assert message(await post(b"", Content_Length="9" * 5000), 413)


@pytest.mark.parametrize("length", [{}, {"Content_Length": "2"}, {"Content_Length": "many"}])
async def test_a_body_of_unknown_length_is_read_up_to_the_bound(length: dict[str, str]) -> None:
    taken: list[int] = []
    answer = await post(chunks(1000, taken), **length)
    assert (
        message(answer, 413)
        == "body: must be at most 4096 bytes long (--max-body-bytes), is 5120 or longer"
    )
    assert len(taken) == 5


async def test_the_admin_routes_read_for_themselves() -> None:
    """Once a request is allowed, and up to a bound of their own; also below a root path."""
    assert (await post(b" " * 2 * MOST, "/flying/x")).json() == 2 * MOST
    assert (await post(b" " * 2 * MOST, "/api/flying/x", "/api")).json() == 2 * MOST
    assert (await post(b" " * 2 * MOST, "/v1/completions", "/api")).status_code == 413


async def test_a_client_that_leaves_within_its_body_reaches_no_route() -> None:
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(part: Any) -> None:
        sent.append(part)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    await app()(scope, receive, send)
    assert b"the client has left" in sent[1]["body"]


async def kept_open(waits: asyncio.Event, length: int) -> AsyncIterator[bytes]:
    """A body that comes but for its last byte, which comes when the event is set."""
    yield b" " * (length - 1)
    await waits.wait()
    yield b" "


async def until(what: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0)


async def test_bodies_of_open_requests_have_a_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first byte until the answer has ended, whoever sends them. A body that is refused
    is not held.
    """
    monkeypatch.setattr(bodies, "LEAST_HELD_BYTES", 2 * MOST)
    monkeypatch.setattr(bodies, "LEAST_HELD_BODIES", 0)
    begun, ends = list[int](), asyncio.Event()

    async def slow(request: Request) -> bytes:
        body = await request.body()
        begun.append(len(body))
        if body.startswith(b"slow"):
            await ends.wait()
        return body

    comes = asyncio.Event()
    transport = httpx.ASGITransport(app(reads=slow))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        def post(content: Any) -> asyncio.Future[httpx.Response]:
            return asyncio.ensure_future(client.post("/v1/completions", content=content))

        answering = post(b"slow".ljust(MOST))
        coming = post(kept_open(comes, 1024))
        await until(lambda: begun == [MOST])
        refused = await post(b" " * MOST)
        assert message(refused, 429) == (
            f"body: bodies of open requests may have {2 * MOST} bytes together: try again later"
        )
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(b" " * (MOST - 1024))).json() == MOST - 1024
        comes.set()
        assert (await coming).json() == 1024
        assert (await post(b" " * MOST)).json() == MOST
        ends.set()
        assert (await answering).json() == MOST
        both = await asyncio.gather(post(b" " * MOST), post(b"." * MOST))
    assert [answer.status_code for answer in both] == [200, 200]


async def test_an_open_request_has_one_copy_of_its_body() -> None:
    """The route's; what is counted is what is held."""
    count, size, held, ends = 8, 2**20 - 64, list[int](), asyncio.Event()

    async def parsed(request: Request) -> bytes:
        held.append(len(await request.json()))
        await ends.wait()
        return b""

    made = gated(max_body_bytes=2**20)

    async def answer(request: Request) -> int:
        return len(await parsed(request))

    made.add_api_route("/v1/completions", answer, methods=["POST"])

    async def content() -> AsyncIterator[bytes]:
        yield b"[0,1,2]"
        yield b" " * (size - 7)

    transport = httpx.ASGITransport(made)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.get("/")
        tracemalloc.start()
        asked = [
            asyncio.ensure_future(client.post("/v1/completions", content=content()))
            for _ in range(count)
        ]
        await until(lambda: len(held) == count)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        ends.set()
        await asyncio.gather(*asked)
    assert count * size < held_bytes < 1.2 * count * size


@pytest.mark.parametrize("path", ["/v1/completions", "/flying/x"])
async def test_a_slow_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Nor one of an order, which its route reads; nor one that comes byte by byte."""
    monkeypatch.setattr(bodies, "BODY_DEADLINE_S", 0.05)

    async def drips() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    transport = httpx.ASGITransport(app(reads=read_json))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path, content=drips())
    assert message(answer, 408) == "body: must have come within 0.05 s"


async def test_a_body_that_overflows_the_stack_is_a_clients_error() -> None:
    """JSON's parser refuses it, or what looks at it once it is parsed."""

    async def calls_itself(request: Request) -> list[Any]:
        def innermost(found: list[Any]) -> list[Any]:
            return innermost(found[0]) if found else found

        return innermost(await request.json())

    made = gated()
    made.exception_handler(RecursionError)(refusals.refuse_depth)

    async def route(request: Request) -> int:
        return len(await calls_itself(request))

    made.add_api_route("/v1/completions", route, methods=["POST"])
    transport = httpx.ASGITransport(made)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for depth, status in ((100, 200), (5_000, 400), (500_000, 400)):
            answer = await client.post("/v1/completions", content=b"[" * depth + b"]" * depth)
            assert answer.status_code == status, answer.text
        assert message(answer, 400) == "body: is nested too deeply"
