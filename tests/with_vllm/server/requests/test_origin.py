"""What one HTTP request asks for is one event, in whatever task of its answer it is asked for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from flying_serving.controller.requests import Origin
from flying_serving.server.requests.origin import origin_of
from tests.with_vllm.server.apps import gated
from tests.with_vllm.server.doubles import request


def origin(call: str) -> Origin:
    """Return where a request of this call comes from."""
    new = request("r")
    new.external_req_id = call
    return origin_of(new)


def app(seen: list[Origin]) -> FastAPI:
    """Return an app whose answers ask for three prompts, as vLLM's do: in tasks of a handler, and
    of a stream.
    """
    made = gated()

    async def ask(call: str) -> None:
        seen.append(origin(call))

    async def answer() -> AsyncIterator[str]:
        await asyncio.gather(
            *(asyncio.create_task(ask(f"cmpl-same-{number}")) for number in range(3))
        )
        yield "done"

    @made.post("/whole")
    async def whole() -> str:
        return await asyncio.create_task(anext(answer()))

    @made.post("/stream")
    async def stream() -> Any:
        return await asyncio.create_task(streamed())

    async def streamed() -> StreamingResponse:
        return StreamingResponse(answer())

    return made


async def test_prompts_of_one_http_request_are_one_event() -> None:
    """Whole or streamed, and whatever name the client gives it; those of another one are another
    event.
    """
    seen: list[Origin] = []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app(seen)), base_url="http://test"
    ) as http:
        for path in ("/whole", "/stream", "/whole"):
            assert (await http.post(path)).status_code == 200
    events = [one.event for one in seen]
    assert len(set(events)) == 3
    assert events == [events[0]] * 3 + [events[3]] * 3 + [events[6]] * 3
    assert [one.call for one in seen[:3]] == ["cmpl-same-0", "cmpl-same-1", "cmpl-same-2"]


def test_outputs_of_one_call_are_one_event_without_http() -> None:
    assert origin("a") == origin("a") == Origin("a", "a")
    assert origin("a").event != origin("b").event
