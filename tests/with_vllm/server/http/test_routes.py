"""The admin routes in an app with vLLM's handlers of errors: what they read of a body, and what
they repeat of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from flying_serving.errors import EngineLost
from flying_serving.server.http import layout_order
from flying_serving.server.http.bodies import MAX_BODY_BYTES
from tests.with_vllm.server.apps import app
from tests.with_vllm.server.doubles import Server
from tests.with_vllm.server.engines.nodes import node

KEY = {"Authorization": "Bearer secret"}
TYPE = {"Content-Type": "application/json"}
CHUNK = b" " * 4096
TAKES_NO_BODY = (("DELETE", "/flying/layout"), ("POST", "/flying/check"))


class Body:
    """A body of many chunks, without a Content-Length; it counts those that are taken."""

    def __init__(self, chunks: int = 1000) -> None:
        self.chunks = chunks
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.chunks):
            self.taken += 1
            yield CHUNK


async def ask(method: str, path: str, content: Any, headers: Mapping[str, str]) -> httpx.Response:
    """Return the answer of a new app."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app()), base_url="http://test"
    ) as client:
        return await client.request(method, path, content=content, headers=dict(headers))


async def order(content: Any) -> httpx.Response:
    """Return the answer to an order of this body, with the key."""
    return await ask("POST", "/flying/layout", content, KEY | TYPE)


def message(answer: httpx.Response, code: int) -> str:
    """Return the message of an answer that has to have this code."""
    assert answer.status_code == code, answer.text
    text = answer.json()["error"]["message"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(("method", "path"), [("POST", "/flying/layout"), *TAKES_NO_BODY])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["none", "wrong"])
async def test_without_the_key_no_body_is_read(
    method: str, path: str, headers: dict[str, str]
) -> None:
    """The answer does not wait for it."""
    body = Body()
    assert message(await ask(method, path, body, headers | TYPE), 401) == "Unauthorized"
    assert body.taken == 0


async def test_of_another_content_type_no_body_is_read() -> None:
    """Nor does it wait for a body that a browser sends without asking."""
    body = Body()
    assert "application/json" in message(
        await ask("POST", "/flying/layout", body, KEY | {"Content-Type": "a/b"}), 400
    )
    assert body.taken == 0


@pytest.mark.parametrize("length", [{}, {"Content-Length": "2"}], ids=["unknown", "wrong"])
async def test_a_body_is_read_up_to_its_bound(length: dict[str, str]) -> None:
    """The bytes that come are counted, whatever the length that it claims."""
    body = Body()
    answer = await ask("POST", "/flying/layout", body, KEY | TYPE | length)
    assert message(answer, 413) == "body: must be at most 16384 bytes long, is 20480 or longer"
    assert body.taken == MAX_BODY_BYTES // len(CHUNK) + 1


async def test_a_body_that_says_that_it_is_too_long_is_not_read() -> None:
    """The answer has the length that it claims."""
    body = Body()
    answer = await ask("POST", "/flying/layout", body, KEY | TYPE | {"Content-Length": "4096000"})
    assert message(answer, 413) == "body: must be at most 16384 bytes long, is 4096000"
    assert body.taken == 0


async def test_a_body_as_long_as_its_bound_is_read_but_no_byte_more() -> None:
    text = b'{"groups": []}'.ljust(MAX_BODY_BYTES)
    assert message(await order(text), 400).startswith("groups=[]: must be")
    assert message(await order(text + b" "), 413)


@pytest.mark.parametrize("depth", [190, 300, 2000, MAX_BODY_BYTES // 2 - 100])
@pytest.mark.parametrize("field", ["groups", "mode", "weave_steps", "colour"])
@pytest.mark.parametrize(("begin", "end"), ["[]", ('{"a":', "}")], ids=["lists", "objects"])
async def test_a_deep_body_is_refused_by_the_parser_or_as_no_order(
    field: str, begin: str, end: str, depth: int
) -> None:
    """Neither the parser nor what repeats the value in a message overflows the stack."""
    depth = min(depth, (MAX_BODY_BYTES - 100) // len(begin + end))
    groups = "" if field == "groups" else '"groups": [[0], [1], [2], [3]], '
    answer = await order(f'{{{groups}"{field}": {begin * depth}1{end * depth}}}')
    says = field if depth < 200 else "body: JSON decode error: recursion limit exceeded at"
    assert message(answer, 400).startswith(says)


@pytest.mark.parametrize(
    "body",
    [
        {"groups": "x" * 9000},
        {"groups": [["x" * 9000]]},
        {"groups": [[0]] * 3000},
        {"groups": [[0], [1], [2], [3]], "mode": ["x" * 9000]},
        {"x" * 9000: 1},
        ["x"] * 3000,
    ],
    ids=["text", "engine", "groups", "mode", "name", "list"],
)
async def test_a_long_value_is_not_repeated(body: Any) -> None:
    """The answer has its beginning and its end, and says what is allowed all the same."""
    answer = await order(json.dumps(body))
    text = message(answer, 400)
    error = answer.json()["error"]
    assert text.startswith(f"{error['field']}=")
    assert text.endswith(error["allowed"])
    assert "..." in text
    assert len(answer.text) < 8 * layout_order.MAX_SHOWN


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xff", b"1" * 5000, b'"\\ud800"'],
    ids=["empty", "cut off", "no text", "too many digits", "half a character"],
)
async def test_malformed_json_is_refused_with_the_parsers_reason(content: bytes) -> None:
    assert message(await order(content), 400).startswith("body: JSON decode error: ")


async def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server() -> None:
    """An answer is made, for nobody."""
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(part: Any) -> None:
        sent.append(part)

    headers = [(name.lower().encode(), value.encode()) for name, value in (KEY | TYPE).items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/flying/layout",
        "query_string": b"",
        "headers": headers,
    }
    await app()(scope, receive, send)
    assert sent[0]["status"] == 400
    assert b"the client has left" in sent[1]["body"]


@pytest.mark.parametrize(
    ("path", "method"), [("/flying/status", "flying_report"), ("/flying/check", "flying_check")]
)
async def test_an_engine_that_is_lost_while_it_is_asked_is_left_out(
    path: str, method: str, tmp_path: Path
) -> None:
    """The others answer, and status says which it is."""
    async with (
        node(tmp_path) as one,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app(one.server)), base_url="http://test"
        ) as client,
    ):
        server = one.server
        one.vllm.stopped = {0, 1, 2, 3}
        verb = "POST" if path == "/flying/check" else "GET"
        asking = asyncio.ensure_future(client.request(verb, path, headers=KEY | TYPE, content="{}"))
        while len(server.told(method)) < 4:
            await asyncio.sleep(0)
        await one.lose(2)
        server.sent()
        answer = await asyncio.wait_for(asking, 5)
        assert answer.status_code == 200, answer.text
        if path == "/flying/status":
            found = answer.json()
            assert found["degraded"] and [loss["engine"] for loss in found["lost"]] == [2]
            assert found["losses"] == {"0": 0, "1": 0, "2": 1, "3": 0}
            assert found["layout"] == [[0], [1], [3]]
            assert found["orphaned_requests"] == {"requeued": 0, "failed": 0}
            assert len(found["engines"]) == 3
        server.messages.clear()
        asking = asyncio.ensure_future(client.request(verb, path, headers=KEY | TYPE, content="{}"))
        while len(server.told(method)) < 3:
            await asyncio.sleep(0)
        server.sent()
        assert (await asyncio.wait_for(asking, 5)).status_code == 200
        assert server.told(method) == [0, 1, 3]


async def test_present_engine_that_does_not_answer_makes_the_check_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what it holds nothing can be said."""
    server = Server()

    async def unanswered(*_: Any) -> Any:
        raise EngineLost("engine 1 did not answer")

    monkeypatch.setattr(server.calls, "_answer", unanswered)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app(server)), base_url="http://test"
    ) as client:
        answer = await client.get("/flying/status", headers=KEY)
    assert message(answer, 503) == "engine 1 did not answer"


@pytest.mark.parametrize("wrong", [None, "2 pages belong to weights and to KV"])
async def test_check_asks_every_engine_and_answers_each_problem(wrong: str | None) -> None:
    server = Server()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app(server)), base_url="http://test"
    ) as client:
        asking = asyncio.ensure_future(client.post("/flying/check", json={}, headers=KEY))
        while len(server.told("flying_check")) < 4:
            await asyncio.sleep(0)
        if wrong is not None:
            # vLLM's type
            list(server.vllm.utility_results.values())[2].set_exception(Exception(wrong))
        server.sent()
        answer = await asyncio.wait_for(asking, 5)
    assert server.told("flying_check") == [0, 1, 2, 3]
    if wrong is None:
        assert answer.json() == {"ok": True}
    else:
        assert message(answer, 500) == wrong
