"""Requests for many nodes: prompts of texts with prefixes in common, sampled with a seed each."""

import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import httpx

from harness.nodes.deployment import MODEL
from harness.streams import RequestFailed, Stream, stream, streamed_body

ANSWER_S = 120.0
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1)
PREFIX, TAIL, OUTPUT = 256, (8, 160), (4, 24)
"""Characters, which are the tiny model's tokens, and output tokens."""


@dataclass
class Asked:
    """A request that was sent, and what has come of it."""

    sent_s: float
    answer: Stream = field(default_factory=Stream)
    problem: str | None = None
    """Why its stream has ended before its time."""
    ended_s: float | None = None

    @classmethod
    def now(cls) -> Self:
        """One that is sent now."""
        return cls(time.monotonic())

    @property
    def ttft_s(self) -> float:
        """Seconds until its first token."""
        return self.answer.arrivals_s[0] - self.sent_s

    def worst_gap_s(self, from_s: float, to_s: float) -> float:
        """The longest time without a token, of what lies between two times."""
        times = [self.sent_s, *self.answer.arrivals_s]
        return max((min(b, to_s) - max(a, from_s) for a, b in pairwise(times)), default=0.0)


def text(draw: random.Random, count: int) -> str:
    """So many letters."""
    return "".join(draw.choices(string.ascii_letters, k=count))


def completion(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A streamed completion of a text."""
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True}
    return streamed_body(MODEL, (), **sampling, **fields) | {"prompt": prompt}


def fresh(draw: random.Random, max_tokens: int) -> dict[str, Any]:
    """A completion of a text that no other begins like."""
    return completion(text(draw, 64), max_tokens, seed=draw.getrandbits(31))


def mixed(count: int, prefixes: int, seed: int) -> list[dict[str, Any]]:
    """Completions of mixed lengths, as many with each prefix: one after the other, prefixes come
    and go.
    """
    draw = random.Random(seed)
    each = count // prefixes
    shared = [text(draw, PREFIX) for _ in range(prefixes)]
    order = sorted(
        (first * each + draw.uniform(0, 2 * each), first)
        for first in range(prefixes)
        for _ in range(each)
    )
    lengths = [(draw.randint(*TAIL), draw.randint(*OUTPUT)) for _ in order]
    return [
        completion(shared[prefix] + text(draw, tail), output, seed=number)
        for number, ((_, prefix), (tail, output)) in enumerate(zip(order, lengths, strict=True))
    ]


def client(url: str, **headers: str) -> httpx.AsyncClient:
    """A client of many connections."""
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=LIMITS, headers=headers)


async def ask(http: httpx.AsyncClient, body: dict[str, Any], into: Asked | None = None) -> Asked:
    """Stream one completion; what goes wrong is noted."""
    asked = Asked.now() if into is None else into
    try:
        await stream(http, body, into=asked.answer)
        if not asked.answer.done or asked.answer.finish_reason is None:
            asked.problem = "the stream has no end"
    except (RequestFailed, httpx.HTTPError) as error:
        asked.problem = repr(error)
    asked.ended_s = time.monotonic()
    return asked


async def ask_all(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    *,
    clients: int,
    rate: float | None = None,
    **fields: Any,
) -> list[Asked]:
    """Stream all, with at most so many at a time, and so many new ones per second. `fields`: more
    of each body.
    """
    places, began_s = asyncio.Semaphore(clients), time.monotonic()
    async with client(url) as http:

        async def one(number: int, body: Mapping[str, Any]) -> Asked:
            if rate is not None:
                await asyncio.sleep(began_s + number / rate - time.monotonic())
            async with places:
                return await ask(http, {**body, **fields})

        return await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))
