"""Pauses, as vLLM's dev mode has them."""

import asyncio

import httpx
import pytest

from harness.live import Server, wait_until
from harness.streams import Stream, begin, stream, streamed_body
from tests.deep.server.behaviour.comparisons import (
    ALONE,
    LANES,
    TOGETHER,
    count_steps,
    long_request,
    prompt,
    same,
    sampling,
)

pytestmark = pytest.mark.server


# ---- pauses, as vLLM's dev mode has them


async def _begun(
    server: Server, http: httpx.AsyncClient, degree: int, count: int, tokens: int
) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """Streams in a lane, with tokens."""
    bodies = [
        streamed_body(server.model, prompt(200 + i, 30), **sampling(i, tokens, degree))
        for i in range(count)
    ]
    return await begin(http, bodies)


async def _paused(http: httpx.AsyncClient) -> bool:
    paused: bool = (await http.get("/is_paused")).json()["is_paused"]
    return paused


@pytest.mark.parametrize("degree", LANES)
async def test_kept_requests_stop_and_go_on_when_resumed(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    """With the same tokens."""
    reference = await stream(
        http, streamed_body(server.model, prompt(200, 30), **sampling(0, 200, degree))
    )
    (into,), (task,) = await _begun(server, http, degree, 1, 200)
    assert (await http.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert await _paused(http)
    await asyncio.sleep(0.1)
    tokens_before, steps_before = len(into.tokens), await count_steps(http)
    await asyncio.sleep(0.5)
    assert len(into.tokens) == tokens_before
    assert await count_steps(http) == steps_before
    assert 0 < len(into.tokens) < 200
    await http.post("/resume")
    assert not await _paused(http)
    same(await task, reference)


@pytest.mark.parametrize("degree", LANES)
async def test_pause_waits_for_running_requests_and_holds_new_ones(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    _, (task,) = await _begun(server, http, degree, 1, 100)
    await http.post("/pause?mode=wait")
    assert (await task).finish_reason == "length"
    later = asyncio.create_task(
        stream(http, streamed_body(server.model, prompt(1, 9), **sampling(1, 3, degree)))
    )
    await asyncio.sleep(0.5)
    assert not later.done()
    await http.post("/resume")
    assert len((await later).tokens) == 3


@pytest.mark.parametrize("degree", LANES)
async def test_a_pause_ends_all_requests_by_default(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    """Those that wait in the task pool too, behind a switch that waits for the others."""
    present, other = (ALONE, TOGETHER) if degree == 1 else (TOGETHER, ALONE)
    await asyncio.to_thread(server.layout, present)
    streams, tasks = await _begun(server, http, degree, 4, 1900)
    order = asyncio.create_task(
        http.post("/flying/layout", json={"groups": other, "mode": "sequential"})
    )
    held = Stream()
    tasks.append(asyncio.create_task(stream(http, long_request(server, 300), into=held)))
    await asyncio.to_thread(wait_until, lambda: server.requests("waiting"))
    await http.post("/pause")
    await asyncio.gather(*tasks)
    assert (await order).status_code == 200, "nothing is left to wait for"
    assert {into.finish_reason for into in streams} == {"abort"}
    assert held.done
    assert held.tokens == [], "vLLM has no chunk for what had no token"
    assert server.status()["requests"] == {"running": 0, "waiting": 0}
    await http.post("/resume")


async def test_sleep_is_a_pause_and_no_more(server: Server, http: httpx.AsyncClient) -> None:
    refused = await http.post("/sleep?level=1")
    assert refused.status_code == 400
    assert "level=1: must be 0; sleep mode cannot be served by Flying Serving yet" in refused.text
    assert not await _paused(http)
    assert (await http.post("/sleep?level=0")).status_code == 200
    assert await _paused(http)
    assert (await http.post("/wake_up?tags=scheduling")).status_code == 200
    assert not await _paused(http)
