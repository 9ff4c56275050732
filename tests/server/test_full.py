"""Requests that may not wait are refused before they are parsed; all else reaches the application as it came."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.json import decode, encode

from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.server.full import RefuseWhenFull
from tests.controller.shell import settings

PART_BYTES = 7


class Application:
    """What lies behind the middleware: it reads all that there is."""

    def __init__(self, waiting: int) -> None:
        controller = Controller(settings("load", 1, max_num_seqs=1, most_waiting=1))
        for number in range(waiting + 1):
            controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
        assert len(controller.pool) == waiting
        core = SimpleNamespace(shell=SimpleNamespace(controller=controller))
        self.owner: Any = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
        self.admission = controller.admission
        self.read = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            self.read += message["body"]

    async def ask(self, path: str = "/v1/completions", method: str = "POST", **fields: Any) -> list[dict[str, Any]]:
        """Send a body in parts, then leave. Returns what is answered."""
        body = encode({"prompt": "a"} | fields)
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

        scope = {"type": "http", "method": method, "path": path}
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
        (1, {"path": "/flying/layout"}),
    ],
    ids=str,
)
async def test_what_may_be_taken_reaches_the_application_whole(waiting: int, asked: dict[str, Any]) -> None:
    application = Application(waiting)
    assert await application.ask(**asked) == []
    assert application.admission.refused == 0
