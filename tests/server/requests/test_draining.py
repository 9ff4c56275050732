"""A node that drains: nothing new gets in, what is under way is counted until its answer is out."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.json import decode

from flying_serving.server.requests.draining import Draining, RefuseWhenDraining


class Application:
    """What lies behind the middleware: it answers when it is told to."""

    def __init__(self) -> None:
        self.draining = Draining()
        core = SimpleNamespace(shell=SimpleNamespace(draining=self.draining))
        self.owner: Any = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
        self.goes_on = asyncio.Event()
        self.reached = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await self.goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, path: str = "/v1/completions", method: str = "POST") -> list[dict[str, Any]]:
        """What is answered."""
        answer: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            answer.append(message)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": method, "path": path, "headers": []}
        await RefuseWhenDraining(self, self.owner)(scope, receive, send)
        return answer


async def test_new_requests_are_refused_with_503() -> None:
    """Those to routes that generate; others, like the models, are answered."""
    application = Application()
    application.goes_on.set()
    application.draining.begin()
    start, body = await application.ask()
    assert start["status"] == 503
    assert decode(body["body"])["error"]["message"] == "the server drains: send the request to another"
    assert application.reached == 0
    assert (await application.ask("/v1/models", "GET"))[0]["status"] == 200
    application.draining.end()
    assert (await application.ask())[0]["status"] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/inference/v1/generate", "/invocations"])
async def test_every_route_that_generates_is_refused(path: str) -> None:
    application = Application()
    application.draining.begin()
    assert (await application.ask(path))[0]["status"] == 503


async def test_what_is_under_way_is_counted_until_it_is_answered() -> None:
    """Also before any engine has it, and when it fails."""
    application = Application()
    under_way = asyncio.ensure_future(application.ask())
    await asyncio.sleep(0)
    application.draining.begin()
    assert application.draining.to_json(0) == {"draining": True, "ready_to_stop": False}
    application.goes_on.set()
    assert (await under_way)[0]["status"] == 200
    assert application.draining.to_json(0)["ready_to_stop"]
    assert not application.draining.to_json(1)["ready_to_stop"]


async def test_a_client_that_leaves_is_not_counted_any_more() -> None:
    application = Application()
    under_way = asyncio.ensure_future(application.ask())
    await asyncio.sleep(0)
    assert application.draining.answering == 1
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert application.draining.answering == 0


def test_a_node_that_does_not_drain_is_not_ready_to_stop() -> None:
    """It may get a request at any moment."""
    assert Draining().to_json(0) == {"draining": False, "ready_to_stop": False}
