"""Clients that leave: their blocks are free soon, and other requests go on."""

import asyncio
from typing import Any

import httpx
import pytest

from harness.live import Server
from harness.streams import stream, streamed_body
from tests.deep.server.behaviour.comparisons import LANES, prompt, same, sampling

pytestmark = pytest.mark.server


# ---- aborts


@pytest.mark.parametrize("degree", LANES)
async def test_client_that_leaves_frees_blocks_and_leaves_other_streams_alike(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    stay = [
        streamed_body(server.model, prompt(i, 40 + i), **sampling(i, 40, degree)) for i in range(3)
    ]
    leave = streamed_body(server.model, prompt(9, 900), **sampling(9, 1000, degree))
    reference = [await stream(http, body) for body in stay]
    server.until_idle()
    before = server.status()["engines"]
    leaving = asyncio.create_task(stream(http, leave, leave_after=4))
    staying = [asyncio.create_task(stream(http, body)) for body in stay]
    left = await leaving
    assert 4 <= len(left.tokens) < 100
    for ours, theirs in zip(await asyncio.gather(*staying), reference, strict=True):
        same(ours, theirs)
    server.until_idle()
    after = server.status()["engines"]
    for old, new in zip(before, after, strict=True):
        unused = [
            sum(engine["lent_blocks"].values()) + engine["free_blocks"] for engine in (old, new)
        ]
        assert unused == [old["blocks"] - 1] * 2, (
            "every block but the null block is free or lent, for prefix caches"
        )
    if degree == 1:
        assert [engine["free_blocks"] for engine in after] == [
            engine["free_blocks"] for engine in before
        ]


async def test_many_clients_leave_at_every_moment(server: Server, http: httpx.AsyncClient) -> None:
    bodies = [
        streamed_body(server.model, prompt(i, 30 * i + 5), **sampling(i, 60, LANES[i % 2]))
        for i in range(12)
    ]
    reference = await asyncio.gather(*(stream(http, body) for body in bodies[:2]))

    async def leave(body: dict[str, Any], after_s: float) -> None:
        task = asyncio.create_task(stream(http, body))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    staying = [asyncio.create_task(stream(http, body)) for body in bodies[:2]]
    await asyncio.gather(*(leave(body, 0.03 * i) for i, body in enumerate(bodies[2:])))
    for ours, theirs in zip(await asyncio.gather(*staying), reference, strict=True):
        same(ours, theirs)
