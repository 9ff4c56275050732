"""Requests that may not wait are refused before they are parsed; all else reaches the application as it came."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.json import decode, encode
from vllm.entrypoints.generate.base import serving

from flying_serving.config import FlyingConfig
from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.server.http.overload import PRIORITY_HEADER, RefuseWhenFull
from flying_serving.server.requests.rights import ClientRights
from tests.controller.shell import settings

PART_BYTES = 7


class Application:
    """What lies behind the middleware: it reads all that there is."""

    def __init__(self, waiting: int, **flying: Any) -> None:
        controller = Controller(settings("load", 1, max_num_seqs=1, most_waiting=1))
        for number in range(waiting + 1):
            controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
        assert len(controller.pool) == waiting
        checks = SimpleNamespace(rights=ClientRights(FlyingConfig(**flying)))
        core = SimpleNamespace(shell=SimpleNamespace(controller=controller, checks=checks))
        self.owner: Any = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
        self.admission = controller.admission
        self.read = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            self.read += message["body"]

    async def ask(
        self, path: str = "/v1/completions", method: str = "POST", header: str | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """Send a body with these fields. Returns what is answered."""
        return await self.send(encode({"prompt": "a"} | fields), path, method, header)

    async def send(
        self, body: bytes, path: str = "/v1/completions", method: str = "POST", header: str | None = None
    ) -> list[dict[str, Any]]:
        """Send a body in parts, then leave. Returns what is answered."""
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts
        ]
        messages.append({"type": "http.disconnect"})
        answer: list[dict[str, Any]] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            answer.append(message)

        headers = [] if header is None else [(PRIORITY_HEADER.lower().encode(), header.encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await RefuseWhenFull(self, self.owner)(scope, receive, send)
        assert self.read == (b"" if answer else body)
        return answer


async def test_a_full_server_refuses_without_the_application() -> None:
    application = Application(waiting=1)
    start, body = await application.ask()
    assert start["status"] == 429
    error = decode(body["body"])["error"]
    assert error["message"] == "1 requests wait already (--max-waiting-requests)"
    assert error["code"] == 429
    assert application.admission.refused == 1


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
async def test_what_may_be_taken_reaches_the_application_whole(waiting: int, asked: dict[str, Any]) -> None:
    application = Application(waiting)
    assert await application.ask(**asked) == []
    assert application.admission.refused == 0


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
async def test_what_speaks_of_a_priority_and_is_not_urgent_is_refused_unparsed(asked: dict[str, Any]) -> None:
    application = Application(waiting=1)
    start, _ = await application.ask(**asked)
    assert start["status"] == 429


@pytest.mark.parametrize("text", ['"priority":-1', '"priority" : -1', '"priority":\n\t-1', '"priority":" -1"'])
async def test_an_urgent_priority_is_found_however_it_is_spaced(text: str) -> None:
    assert await Application(waiting=1).send(f"{{{text}}}".encode()) == []


@pytest.mark.parametrize("flying", [{"clients_may_set": ("tp_degree",)}, {"most_urgent_priority": 0}], ids=str)
async def test_where_no_request_may_be_urgent_none_is_parsed(flying: dict[str, Any]) -> None:
    start, _ = await Application(waiting=1, **flying).ask(priority=-1)
    assert start["status"] == 429


def test_the_header_is_vllms() -> None:
    assert PRIORITY_HEADER == serving.PRIORITY_HEADER
