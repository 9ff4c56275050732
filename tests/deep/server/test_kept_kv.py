"""Blocks of requests that have left an engine are free when nobody can pull them, and when another
request needs them.

Time alone frees none here: KV that is kept would be kept for ten minutes. Each of two engines has
32 blocks of 32 tokens beside vLLM's null block, so 1,024 tokens.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from flying_serving.server.requests.xargs import EXPECTED_KEY
from harness.live import BLOCK_BYTES, Server, wait_until
from harness.streams import WORST_LOGPROB, Stream, begin, streamed_body, worst_difference
from tests.deep.conftest import SMALL_BLOCKS
from tests.stock.requests import tokens

pytestmark = pytest.mark.server

ENGINES = 2
APART, TOGETHER = [[0], [1]], [[0, 1]]
KEPT_FOR_EVER = "from flying_serving.migration import source; source.RETAIN_S = 600.0"
GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = (
        "--max-model-len=2048",
        "--max-num-seqs=2",
        "--max-queue-wait-s=1000",
        f"--kv-cache-memory-bytes={SMALL_BLOCKS * BLOCK_BYTES}",
    )
    with Server("llama", ENGINES, *flags, preamble=KEPT_FOR_EVER) as live:
        live.complete(tokens(0, 8), max_tokens=1)
        # before that no KV is kept
        wait_until(lambda: live.status()["migration_cost"], live.status)
        yield live


def free_blocks(server: Server) -> list[int]:
    """Blocks of each engine that nothing holds and that are not lent."""
    return [engine["free_blocks"] for engine in server.status()["engines"]]


def shown(server: Server) -> dict[str, dict[tuple[str, ...], float]]:
    """vLLM's gauges, by engine."""
    return {name: server.metric(name, "engine") for name in GAUGES}


def until_zero(server: Server) -> None:
    """Wait until all gauges of all engines read 0, as stock vLLM's do when nothing runs."""
    wait_until(
        lambda: not any(any(by_engine.values()) for by_engine in shown(server).values()),
        lambda: shown(server),
    )


def fill(server: Server, count: int) -> list[str]:
    """Let requests that ask for all that the model's length leaves run until their engines are
    full; how they end.
    """
    fields: dict[str, Any] = {"max_tokens": 2048 - 40, "ignore_eos": True, "temperature": 0.0}

    async def run() -> list[Stream]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            bodies = [
                streamed_body(server.model, tokens(number, 40), **fields) for number in range(count)
            ]
            _, tasks = await begin(http, bodies)
            return await asyncio.gather(*tasks)

    return [str(stream.finish_reason) for stream in asyncio.run(run())]


def test_blocks_of_a_request_that_filled_its_engine_are_free_when_it_ends(server: Server) -> None:
    """No group goes on with it, and so nobody can pull its KV: the next request has its blocks."""
    server.layout(APART)
    assert fill(server, ENGINES) == ["length"] * ENGINES
    wait_until(lambda: free_blocks(server) == [SMALL_BLOCKS - 1] * ENGINES, server.status)
    until_zero(server)
    assert len(server.complete(tokens(9, 900), max_tokens=4, ignore_eos=True)["token_ids"]) == 4
    server.check()


def test_kv_of_waiting_requests_yields_to_running_ones(server: Server) -> None:
    """The group takes two of four; KV of the others stays in their engines, where the group needs
    room.
    """
    server.layout(APART)
    before = server.metric("vllm:num_preemptions_total")

    def fields(number: int) -> dict[str, Any]:
        """What a request asks for: the same tokens always; the logprobs tell what it has read."""
        xargs = {"force_token_ids": list(tokens(10 + number, 600)), EXPECTED_KEY: 100}
        return {"max_tokens": 600, "ignore_eos": True, "temperature": 0.0, "vllm_xargs": xargs}

    async def run() -> list[Stream]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            _, tasks = await begin(
                http,
                [streamed_body(server.model, tokens(n, 300), **fields(n)) for n in range(4)],
                4,
            )
            answer = await http.post("/flying/layout", json={"groups": TOGETHER, "mode": "migrate"})
            assert answer.status_code == 200, answer.text
            return await asyncio.gather(*tasks)

    streams = asyncio.run(run())
    assert server.metric("vllm:num_preemptions_total") == before
    with ThreadPoolExecutor(2) as pool:  # as many as the group has room for
        undisturbed = list(
            pool.map(lambda n: server.complete(tokens(n, 300), **fields(n)), range(len(streams)))
        )
    for stream, alone in zip(streams, undisturbed, strict=True):
        assert stream.tokens == alone["token_ids"]
        assert (
            worst_difference(stream.logprobs, alone["logprobs"]["token_logprobs"]) <= WORST_LOGPROB
        )
    until_zero(server)
    server.check()


def test_gauges_read_zero_after_requests_have_migrated(server: Server) -> None:
    """On every engine, also those whose blocks were freed without a step: there is no output that
    could say so.
    """
    server.layout(APART)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            body = streamed_body(
                server.model, tokens(5, 600), max_tokens=200, ignore_eos=True, temperature=0.0
            )
            _, tasks = await begin(http, [body], 4)
            for groups in (TOGETHER, APART):
                answer = await http.post(
                    "/flying/layout", json={"groups": groups, "mode": "migrate"}
                )
                assert answer.status_code == 200, answer.text
            await asyncio.gather(*tasks)

    asyncio.run(run())
    until_zero(server)
