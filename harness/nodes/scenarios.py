"""A node that is killed, and one that drains, while streams run and new requests arrive: what
becomes of them all.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.nodes.deployment import Deployment, NodeAt
from harness.nodes.load import Asked, ask, client, fresh

STREAMS, STREAM_TOKENS = 12, 200
BURST, BURST_TOKENS = 2, 4
"""New requests arrive in bursts, as a router gives a lone one to the first of the nodes that have
none.
"""
WATCHED_S = 4.0
"""For how long after the event times are looked at."""
OFTEN_S, RARELY_S = 0.25, 0.5
"""Between bursts, until then and from then on."""
WITHIN_S = 200.0


@dataclass
class Figures:
    """What became of requests; `event_s`: when the node was killed, or told to drain
    (time.monotonic).
    """

    event_s: float
    on_node: int
    """Streams that the node had."""
    bodies: list[dict[str, Any]]
    streams: list[Asked]
    new: list[Asked] = field(default_factory=list)
    """Requests that arrived while the streams ran, and after."""
    back_s: float | None = None
    """Until the node is ready again after a kill; until it had no request after it was told to
    drain.
    """
    used_s: float | None = None
    """Until it has answered a new request: after the kill, or after it was told to take requests
    again.
    """
    after_drain: float | None = None
    """Requests that the node got while it had none left."""

    @property
    def broken(self) -> list[str]:
        """Why streams ended early, of those that did."""
        return [one.problem for one in self.streams if one.problem is not None]

    @property
    def refused(self) -> list[str]:
        """Why new requests were not answered."""
        return [one.problem for one in self.new if one.problem is not None]

    @property
    def served_meanwhile(self) -> int:
        """How many requests that arrived after the event were answered before the node was back."""
        assert self.back_s is not None
        until_s = self.event_s + self.back_s
        return sum(
            one.sent_s > self.event_s and one.ended_s is not None and one.ended_s < until_s
            for one in self.new
        )

    @property
    def worst_new_s(self) -> float:
        """The longest that a request waited for its first token that arrived soon after the
        event.
        """
        soon = [
            one
            for one in self.new
            if 0 <= one.sent_s - self.event_s < WATCHED_S and one.problem is None
        ]
        return max(one.ttft_s for one in soon)

    @property
    def worst_gap_s(self) -> float:
        """The longest time without a token of streams that went on."""
        until_s = self.event_s + WATCHED_S
        return max(
            one.worst_gap_s(self.event_s, until_s) for one in self.streams if one.problem is None
        )


async def killed(deployment: Deployment, number: int, seed: int) -> Figures:
    """Kill a node (SIGKILL) under streams, and wait until it is back and has answered new
    requests.
    """
    node, times = deployment.nodes()[number], deployment.times_ready(number)
    async with under_load(deployment, node, seed) as figures:
        node.process.kill()
        await until(lambda: deployment.times_ready(number) > times)
        figures.back_s = time.monotonic() - figures.event_s
        again = deployment.nodes()[number]
        await until(lambda: _answered(again) > 0)
        figures.used_s = time.monotonic() - figures.event_s
    return figures


async def drained(deployment: Deployment, number: int, seed: int) -> Figures:
    """Drain a node under streams until it has none, then let it take requests again, and wait until
    it has answered.
    """
    node = deployment.nodes()[number]
    async with under_load(deployment, node, seed) as figures:
        await asyncio.to_thread(node.ask, "POST", "/flying/drain", {})
        await until(lambda: node.ask("GET", "/flying/drain")["ready_to_stop"])
        figures.back_s = time.monotonic() - figures.event_s
        answered = _answered(node)
        await asyncio.sleep(2 * RARELY_S)
        figures.after_drain = _answered(node) - answered
        began_s = time.monotonic()
        await asyncio.to_thread(node.ask, "DELETE", "/flying/drain")
        await until(lambda: _answered(node) > answered)
        figures.used_s = time.monotonic() - began_s
    return figures


@asynccontextmanager
async def under_load(deployment: Deployment, node: NodeAt, seed: int) -> AsyncIterator[Figures]:
    """Streams on all nodes when the body begins, and new requests all the time; at the end all have
    ended.
    """
    draw = random.Random(seed)
    bodies = [fresh(draw, STREAM_TOKENS) for _ in range(STREAMS)]
    streams = [Asked.now() for _ in bodies]
    async with client(deployment.url) as http, asyncio.TaskGroup() as tasks:
        for body, one in zip(bodies, streams, strict=True):
            tasks.create_task(ask(http, body, one))
        await until(lambda: all(one.answer.tokens for one in streams))
        figures = Figures(time.monotonic(), node.load(), bodies, streams)
        arrivals = tasks.create_task(_arrive(http, draw, figures, tasks))
        try:
            yield figures
        finally:
            arrivals.cancel()


async def _arrive(
    http: httpx.AsyncClient, draw: random.Random, figures: Figures, tasks: asyncio.TaskGroup
) -> None:
    while True:
        for _ in range(BURST):
            figures.new.append(Asked.now())
            tasks.create_task(ask(http, fresh(draw, BURST_TOKENS), figures.new[-1]))
        soon = time.monotonic() - figures.event_s < WATCHED_S
        await asyncio.sleep(OFTEN_S if soon else RARELY_S)


def _answered(node: NodeAt) -> float:
    """How many requests it has answered."""
    return node.counted()["vllm:request_success_total"]


async def until(true: Callable[[], object]) -> None:
    """Wait for what is asked in a thread, as servers answer it."""
    async with asyncio.timeout(WITHIN_S):
        while not await asyncio.to_thread(true):
            await asyncio.sleep(0.02)
