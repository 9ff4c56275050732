"""The gate: a request that may not pass is refused before it is parsed; any other reaches the
routes as it came.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from msgspec.json import decode, encode
from starlette.types import Message
from vllm.entrypoints.generate.base import serving

from flying_serving.controller.requests import RequestSpec
from flying_serving.server.figures.page import Published
from flying_serving.server.http.gate import Gate
from flying_serving.server.http.overload import PRIORITY_HEADER
from flying_serving.server.shell import Shell
from tests.unit.controller.model_settings import settings
from tests.with_vllm.server.apps import SECRET, gated
from tests.with_vllm.server.doubles import Server, model_config

PART_BYTES = 7
MAX_BODY_BYTES = 4096
COMPLETIONS = "/v1/completions"


class GatedApp:
    """An app behind the gate, whose one engine runs one request; `waiting` of at most one request
    wait.

    `goes_on`: its routes answer when it is set, with `status`. `bodies`: of the requests that have
    reached a route.
    """

    def __init__(self, waiting: int = 0, keys: tuple[str, ...] = (), **flying: Any) -> None:
        calls, model = Server().calls, model_config()
        rights = calls.deployment.flying.model_copy(update=flying)
        calls.deployment = calls.deployment.model_copy(update={"flying": rights})
        self.shell = Shell(calls, settings("load", 1, max_num_seqs=1, most_waiting=1), model)
        self.admission = self.shell.controller.admission
        for number in range(waiting + 1):
            self.shell.controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.bodies: list[bytes] = []
        self.status = 200
        self.app = gated(self.shell, keys, max_body_bytes=MAX_BODY_BYTES)
        self.app.add_api_route("/{path:path}", self._answer, methods=["GET", "POST"])

    async def _answer(self, request: Request) -> None:
        self.bodies.append(await request.body())
        await self.goes_on.wait()
        if self.status != 200:
            raise HTTPException(self.status, "a route's own refusal")

    async def ask(
        self,
        path: str = COMPLETIONS,
        method: str = "POST",
        header: str | None = None,
        **fields: Any,
    ) -> httpx.Response:
        """Send a body with these fields in small parts. Returns the answer."""
        return await self.send(encode({"prompt": "a"} | fields), path, method, header)

    async def send(
        self, body: bytes, path: str = COMPLETIONS, method: str = "POST", header: str | None = None
    ) -> httpx.Response:
        """Send a body in small parts. Returns the answer."""
        headers = {} if header is None else {PRIORITY_HEADER: header}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://test"
        ) as client:
            return await client.request(method, path, content=parts(body), headers=headers)


async def parts(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in parts of PART_BYTES."""
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


# ---- a server that is full


async def test_a_request_to_a_full_server_is_refused_without_the_application() -> None:
    node = GatedApp(waiting=1)
    answer = await node.ask()
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["message"] == "1 requests wait already (--max-waiting-requests)"
    assert error["code"] == 429
    assert node.admission.refused == 1
    assert node.bodies == []


@pytest.mark.parametrize(
    ("waiting", "asked"),
    [
        (0, {}),
        (1, {"path": "/v1/models"}),
        (1, {"method": "GET"}),
        (1, {"priority": -1}),
        (1, {"priority": "-1"}),
        (1, {"priority": -1.0}),
        (1, {"header": "-5"}),
        (1, {"path": "/flying/layout"}),
    ],
    ids=str,
)
async def test_a_request_that_may_pass_reaches_the_application_whole(
    waiting: int, asked: dict[str, Any]
) -> None:
    node = GatedApp(waiting)
    assert (await node.ask(**asked)).status_code == 200
    fields = {name: value for name, value in asked.items() if name == "priority"}
    assert node.bodies == [encode({"prompt": "a"} | fields)]
    assert node.admission.refused == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"priority": 0},
        {"priority": 5},
        {"header": "5"},
        {"metadata": {"priority": "high"}},
        {"prompt": 'say "priority": -1'},
        {"user": "priority"},
    ],
    ids=str,
)
async def test_a_request_that_speaks_of_a_priority_and_is_not_urgent_is_refused(
    asked: dict[str, Any],
) -> None:
    node = GatedApp(waiting=1)
    assert (await node.ask(**asked)).status_code == 429
    assert node.bodies == []


@pytest.mark.parametrize(
    "text", ['"priority":-1', '"priority" : -1', '"priority":\n\t-1', '"priority":" -1"']
)
async def test_an_urgent_priority_is_seen_however_it_is_spaced(text: str) -> None:
    assert (await GatedApp(waiting=1).send(f"{{{text}}}".encode())).status_code == 200


@pytest.mark.parametrize(
    "flying", [{"clients_may_set": ("tp_degree",)}, {"most_urgent_priority": 0}], ids=str
)
async def test_an_urgent_request_is_refused_where_none_may_be_urgent(
    flying: dict[str, Any],
) -> None:
    assert (await GatedApp(waiting=1, **flying).ask(priority=-1)).status_code == 429


def test_the_priority_header_is_vllms() -> None:
    assert PRIORITY_HEADER == serving.PRIORITY_HEADER


# ---- a server that drains


PATHS = (
    COMPLETIONS,
    "/v1/chat/completions",
    "/v1/messages",
    "/inference/v1/generate",
    "/invocations",
)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_generates_is_refused_while_the_node_drains(path: str) -> None:
    node = GatedApp()
    node.shell.draining.begin()
    answer = await node.ask(path)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server drains: send the request to another"
    assert node.bodies == []


async def test_draining_node_answers_requests_that_do_not_generate() -> None:
    node = GatedApp()
    node.shell.draining.begin()
    assert (await node.ask("/v1/models", "GET")).status_code == 200


async def test_a_request_is_answered_once_the_node_drains_no_longer() -> None:
    node = GatedApp()
    node.shell.draining.begin()
    node.shell.draining.end()
    assert (await node.ask()).status_code == 200


async def test_a_request_under_way_is_counted_until_it_is_answered() -> None:
    """Also before an engine has it."""
    node = GatedApp()
    node.goes_on.clear()
    answering = asyncio.ensure_future(node.ask())
    while not node.bodies:
        await asyncio.sleep(0)
    assert node.shell.draining.answering == 1
    node.goes_on.set()
    assert (await answering).status_code == 200
    assert node.shell.draining.answering == 0


async def test_a_request_that_fails_is_not_counted_any_more() -> None:
    node = GatedApp()
    node.status = 500
    assert (await node.ask()).status_code == 500
    assert node.shell.draining.answering == 0


# ---- when to try again


async def test_a_refusal_of_a_full_server_says_when_to_try_again() -> None:
    assert int((await GatedApp(waiting=1).ask()).headers["retry-after"]) >= 1


async def test_a_refusal_of_a_draining_node_says_when_to_try_again() -> None:
    node = GatedApp()
    node.shell.draining.begin()
    assert (await node.ask()).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("status", "ends", "says"), [(429, False, True), (503, True, True), (503, False, False)]
)
async def test_a_refusal_of_a_route_says_when_to_try_again(
    status: int, ends: bool, says: bool
) -> None:
    """A route's 503 of a server that goes on is about something other than load."""
    node = GatedApp()
    node.status, node.shell.calls.ending = status, ends
    answer = await node.ask()
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) is says


# ---- the order of the checks


async def test_a_request_without_the_key_is_refused_before_its_body_is_read() -> None:
    node = GatedApp(keys=(SECRET,))
    taken: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        taken.append(1)
        yield b"{}"

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(node.app), base_url="http://test"
    ) as client:
        answer = await client.post(COMPLETIONS, content=body())
    assert answer.status_code == 401
    assert taken == []


async def test_a_body_that_is_too_long_is_refused_as_such_while_the_node_drains() -> None:
    node = GatedApp()
    node.shell.draining.begin()
    assert (await node.send(b" " * (MAX_BODY_BYTES + 1))).status_code == 413


async def test_a_draining_node_refuses_as_such_while_it_is_full() -> None:
    node = GatedApp(waiting=1)
    node.shell.draining.begin()
    assert (await node.ask()).status_code == 503


# ---- other messages


async def test_a_client_that_leaves_after_its_body_is_seen_by_the_route() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
        {"type": "http.disconnect"},
    ]
    seen: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(_: Message) -> None: ...

    async def application(_: Any, receive: Any, __: Any) -> None:
        seen.extend([await receive(), await receive()])

    owner = GatedApp().app
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "app": owner}
    await Gate(application, MAX_BODY_BYTES, Published())(scope, receive, send)
    whole = {"type": "http.request", "body": b"{}", "more_body": False}
    assert seen == [whole, {"type": "http.disconnect"}]


async def test_a_start_of_the_application_passes() -> None:
    """ASGI's lifespan is no request, and comes before there is an engine client."""
    passed: list[str] = []

    async def application(scope: Any, *_: Any) -> None:
        passed.append(scope["type"])

    await Gate(application, MAX_BODY_BYTES, Published())({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert passed == ["lifespan"]


class Metrics:
    """Counts the pages that are made."""

    def __init__(self) -> None:
        self.pages = 0

    async def page(self) -> Any:
        """The next page, with one metric: its number."""
        self.pages += 1
        return SimpleNamespace(metrics=[self.pages])

    def node_series(self) -> list[Any]:
        """One metric more."""
        return ["node"]


def scraped(published: Published, metrics: Metrics | None) -> FastAPI:
    """Return an app whose routes answer with what is published."""
    made = gated(published=published, metrics=metrics)
    made.add_api_route("/{path:path}", lambda: list(published.collect()))
    return made


@pytest.mark.parametrize(
    ("path", "pages"),
    [("/metrics", 1), ("/metrics/", 1), ("/behind/a/proxy/metrics", 1), ("/v1/models", 0)],
)
async def test_a_page_of_metrics_is_made_before_its_route_reads_it(path: str, pages: int) -> None:
    """vLLM's routes read it from the registry, perhaps in a thread."""
    metrics = Metrics()
    transport = httpx.ASGITransport(scraped(Published(), metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get(path)
    assert decode(answer.content) == [1, "node"][: 2 * pages]
    assert metrics.pages == pages


async def test_a_server_without_metrics_publishes_none() -> None:
    """`--disable-log-stats`."""
    transport = httpx.ASGITransport(scraped(Published(), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/metrics")).json() == []
