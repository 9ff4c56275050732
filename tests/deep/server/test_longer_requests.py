"""Requests that get longer than `split` has planned them for move while they stream, and their
clients do not notice.

The planner of this server says each time that another engine is better.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.live import Server
from harness.streams import WORST_LOGPROB, Stream, stream, streamed_body, worst_difference

pytestmark = pytest.mark.server

REQUESTS, PROMPT, OUTPUTS = 6, 70, 160
MOVING = (
    "from flying_serving.controller import splitter; splitter.is_better_elsewhere = lambda *_: True"
)
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, "--policy=split", preamble=MOVING) as live:
        yield live


def body(server: Server, number: int, expected_tokens: int) -> dict[str, Any]:
    """A request that is told its tokens, and says how many it expects; no limit says more."""
    draw = random.Random(number)
    prompt, forced = (
        [draw.randrange(300, 500) for _ in range(count)] for count in (PROMPT, OUTPUTS)
    )
    xargs = {"force_token_ids": forced, "expected_tokens": expected_tokens}
    return streamed_body(server.model, prompt, max_tokens=OUTPUTS, vllm_xargs=xargs)


async def ask(server: Server, expected_tokens: int) -> list[Stream]:
    """All requests at once."""
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
        bodies = [body(server, number, expected_tokens) for number in range(REQUESTS)]
        return await asyncio.gather(*(stream(http, one) for one in bodies))


def counts(server: Server) -> dict[str, int]:
    """What the server says of splits."""
    found: dict[str, int] = server.status()["splits"]
    return found


def test_requests_that_outlast_their_plan_move_and_answer_the_same(server: Server) -> None:
    """Those that expect enough tokens stay where they are."""
    stayed = asyncio.run(ask(server, OUTPUTS))
    assert counts(server)["replanned"] == 0
    moved = asyncio.run(ask(server, 1))
    assert counts(server)["moved"] == REQUESTS
    for number, (answer, other) in enumerate(zip(moved, stayed, strict=True)):
        forced = body(server, number, 1)["vllm_xargs"]["force_token_ids"]
        assert answer.tokens == other.tokens == forced
        assert answer.done and answer.finish_reason == "length"
        assert worst_difference(answer.logprobs, other.logprobs) <= WORST_LOGPROB
    server.until_idle()
    migrations = [engine["migrations"] for engine in server.status()["engines"]]
    assert sum(one["migrated"] for one in migrations) >= REQUESTS
    assert sum(one["prefilled_again"] for one in migrations) == 0
    server.check()
