"""Bodies of requests to vLLM's routes: read up to a bound, with no more levels than the stack has
room for.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.server.http import body_room, pace
from flying_serving.server.http.bodies import MAX_REQUEST_DEPTH, is_deeper, read_json
from tests.with_vllm.server.apps import gated

MOST = 4096
LISTS, OBJECTS = (b"[", b"]"), (b'{"a":', b"}")
values = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\a\n☃', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('[{"\\', max_size=2), inner, max_size=3)
    ),
)


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


def depth_of(value: object) -> int:
    """How many lists and objects are within each other."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


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


@pytest.mark.parametrize(("begin", "end"), [LISTS, OBJECTS], ids=["lists", "objects"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
async def test_a_body_nested_too_deeply_is_refused(begin: bytes, end: bytes, encoding: str) -> None:
    """In every encoding that JSON's parser takes; whether it ends or not."""
    for depth, refused in ((MAX_REQUEST_DEPTH, False), (MAX_REQUEST_DEPTH + 1, True)):
        for text in (begin * depth + b"1" + end * depth, begin * depth):
            answer = await post(text.decode().encode(encoding))
            if refused:
                assert (
                    message(answer, 400) == f"body: must be nested at most {MAX_REQUEST_DEPTH} deep"
                )
            else:
                assert answer.status_code == 200


async def test_brackets_in_text_and_in_files_are_not_levels() -> None:
    assert (await post(json.dumps("[" * 1000))).status_code == 200
    assert (
        await post(b"[" * 1000, Content_Type="multipart/form-data; boundary=x")
    ).status_code == 200
    assert (await post(json.dumps([[number] for number in range(500)]))).status_code == 200


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


@given(
    value=values,
    most=st.integers(0, 6),
    ascii=st.booleans(),
    encoding=st.sampled_from(["utf-8", "utf-16"]),
)
def test_levels_are_counted_as_the_parser_finds_them(
    value: object, most: int, ascii: bool, encoding: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert is_deeper(text.encode(encoding), most) is (depth_of(value) > most)


@given(content=st.binary(max_size=60) | st.text('[]{}":,\\1 ', max_size=60).map(str.encode))
def test_body_within_the_depth_limit_is_parsed_or_no_json(content: bytes) -> None:
    """Never is there more in it than was counted."""
    deeper = is_deeper(content, 2)
    try:
        found = json.loads(content)
    except ValueError:
        return
    assert deeper is (depth_of(found) > 2)


async def kept_open(waits: asyncio.Event, length: int) -> AsyncIterator[bytes]:
    """A body that comes but for its last byte, which comes when the event is set."""
    yield b" " * (length - 1)
    await waits.wait()
    yield b" "


async def test_bodies_being_read_leave_room_to_other_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One address may hold half of the room; what was read makes room again."""
    monkeypatch.setattr(body_room, "START_BYTES", 0)
    monkeypatch.setattr(body_room, "LEAST_ROOM_BYTES", 2 * MOST)
    made, waits = app(), asyncio.Event()

    def client(address: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(made, client=(address, 1)), base_url="http://test:8000"
        )

    async with client("10.0.0.7") as greedy, client("10.0.0.8") as other:
        slow = asyncio.ensure_future(greedy.post("/v1/completions", content=kept_open(waits, MOST)))
        await asyncio.sleep(0.05)
        refused = await greedy.post("/v1/completions", content=b" " * MOST)
        assert f"body: bodies being read have {2 * MOST} bytes together" in message(refused, 429)
        assert (await other.post("/v1/completions", content=b" " * (MOST // 2))).json() == MOST // 2
        waits.set()
        assert (await slow).json() == MOST
        assert (await greedy.post("/v1/completions", content=b" " * MOST)).json() == MOST


async def test_short_bodies_being_read_have_a_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many clients that send a part of a short body each do not fill the memory."""
    monkeypatch.setattr(body_room, "START_ROOM_BYTES", 2 * 1024)
    made, waits = app(), asyncio.Event()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(made), base_url="http://test:8000"
    ) as client:
        slow = asyncio.ensure_future(client.post("/v1/completions", content=kept_open(waits, 1024)))
        await asyncio.sleep(0.05)
        refused = await client.post("/v1/completions", content=b" " * 1024)
        assert "body: bodies being read have 2048 bytes together" in message(refused, 429)
        waits.set()
        assert (await slow).json() == 1024


@pytest.mark.parametrize("path", ["/v1/completions", "/flying/x"])
async def test_a_body_that_stalls_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Nor one of an order, which its route reads."""
    monkeypatch.setattr(pace, "GRACE_S", 0.05)

    async def stalls() -> AsyncIterator[bytes]:
        yield b" "
        await asyncio.sleep(60)

    asked = app(reads=read_json)
    transport = httpx.ASGITransport(asked)
    async with httpx.AsyncClient(transport=transport, base_url="http://test:8000") as client:
        answer = await client.post(path, content=stalls())
    assert message(answer, 408) == "body: has fallen 0.05 s behind the least rate, 32768 bytes/s"
