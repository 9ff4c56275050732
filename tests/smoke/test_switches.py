"""The layout changes while requests stream, and nobody could tell from their answers."""

import asyncio

import pytest

from flying_serving.config import MODES
from harness.live import Server
from tests.smoke.four_requests import OUTPUTS, PROMPT_TOKENS, REQUESTS, streams_answer_as_stock

pytestmark = pytest.mark.server

WAITS_FOR_OLD_REQUESTS = {"sequential", "soft"}
LETS_OLD_REQUESTS_RUN = {"weave", "hard"}


def migrations(server: Server) -> dict[str, int]:
    """Requests that have gone to another group, with their KV or without."""
    counts = [engine["migrations"] for engine in server.status()["engines"]]
    return {key: sum(count[key] for count in counts) for key in counts[0]}


@pytest.mark.parametrize("mode", MODES)
async def test_streams_go_on_through_a_switch(two: Server, mode: str) -> None:
    """In each mode: engines that stand alone join, and split again under the next streams."""
    before = migrations(two)["migrated"]
    for old, new in (([[0], [1]], [[0, 1]]), ([[0, 1]], [[0], [1]])):
        async with streams_answer_as_stock(two):
            switch = await asyncio.to_thread(two.layout, new, mode)
            assert two.status()["layout"] == new
        assert (switch["from"], switch["to"], switch["mode"]) == (old, new, mode)
        assert switch["requests_in_flight"] == len(REQUESTS)
        assert switch["problem"] is None and switch["cutover_ms"] > 0
        if mode in WAITS_FOR_OLD_REQUESTS:
            assert switch["drain_ms"] is not None and switch["waited_for_idle_ms"] > 0
        if mode in LETS_OLD_REQUESTS_RUN:
            assert switch["drain_ms"] is None, "old requests run on in their groups"
    assert [one["number"] for one in two.switches()[-2:]] == [
        switch["number"] - 1,
        switch["number"],
    ]
    migrated = migrations(two)["migrated"] - before
    assert migrated == (2 * len(REQUESTS) if mode == "migrate" else 0)


async def test_requests_migrate_with_their_kv(four: Server) -> None:
    """A group of four pulls all KV of their prompts from engines that stood alone, and computes
    none of it again.
    """
    before = migrations(four)
    async with streams_answer_as_stock(four):
        await asyncio.to_thread(four.layout, [[0, 1, 2, 3]], "migrate")
    made = {key: count - before[key] for key, count in migrations(four).items()}
    assert made["migrated"] == len(REQUESTS)
    assert made["prefilled_again"] == 0
    assert PROMPT_TOKENS <= made["migrated_tokens"] < PROMPT_TOKENS + OUTPUTS * len(REQUESTS)
