"""A streaming client for benchmarks: the time of every token."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from flying_lab.sse import EventStream
from harness.streams import RequestFailed, streamed

ANSWER_S = 300.0


@dataclass
class Stream:
    """One request: when it was sent and when each token came (seconds, monotonic)."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


@dataclass(frozen=True)
class Arrival:
    """A request to be sent `at_s` after the first moment.

    `xargs`: its `vllm_xargs`, which only our servers know. `leaves_after`: tokens after which its
    client leaves, so that no server knows its length; without, it gets `max_tokens`.
    """

    at_s: float
    token_ids: list[int]
    max_tokens: int
    xargs: dict[str, Any] | None = None
    leaves_after: int | None = None


def prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of random token ids that no other seed shares a prefix with."""
    draw = random.Random(seed)
    return [draw.randrange(300, 500) for _ in range(tokens)]


async def stream(
    client: httpx.AsyncClient,
    model: str,
    token_ids: list[int],
    max_tokens: int,
    xargs: dict[str, Any] | None = None,
    began: asyncio.Event | None = None,
    leaves_after: int | None = None,
) -> Stream:
    """Send one request and read it to its end, or leave after some tokens; `began` is set at its
    first token.

    Raises:
        RequestFailed: if it failed or stopped early.
    """
    body = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": leaves_after is None,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    } | ({} if xargs is None else {"vllm_xargs": xargs})
    result = Stream(time.monotonic())
    async with streamed(client, body, EventStream()) as events:
        async for event in events:
            result.token_s += [time.monotonic()] * sum(choice.tokens for choice in event.choices)
            if began is not None and result.token_s:
                began.set()
            if leaves_after is not None and len(result.token_s) >= leaves_after:
                del result.token_s[leaves_after:]
                break
    wanted = max_tokens if leaves_after is None else leaves_after
    if len(result.token_s) != wanted:
        raise RequestFailed(f"{len(result.token_s)} of {wanted} tokens came")
    return result


def run_streams(
    url: str, models: str | Sequence[str], prompts: list[list[int]], max_tokens: int
) -> tuple[list[Stream], float]:
    """Send all prompts at once. Returns the streams and output tokens per second over the whole.

    `models`: the name of the model, or one for each prompt.
    """
    names = [models] * len(prompts) if isinstance(models, str) else models
    asked = list(zip(names, prompts, strict=True))

    async def together() -> tuple[list[Stream], float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=ANSWER_S) as client:
            started = time.monotonic()
            streams = await asyncio.gather(*(stream(client, *one, max_tokens) for one in asked))
            return list(streams), len(prompts) * max_tokens / (time.monotonic() - started)

    return asyncio.run(together())


def serve_arrivals(url: str, model: str, arrivals: Sequence[Arrival]) -> list[Stream]:
    """Send each request at its time. Returns the streams, in the same order."""

    async def serve() -> list[Stream]:
        async with httpx.AsyncClient(
            base_url=url, limits=httpx.Limits(), timeout=ANSWER_S
        ) as client:

            async def one(arrival: Arrival) -> Stream:
                await asyncio.sleep(arrival.at_s)
                return await stream(
                    client,
                    model,
                    arrival.token_ids,
                    arrival.max_tokens,
                    arrival.xargs,
                    leaves_after=arrival.leaves_after,
                )

            return list(await asyncio.gather(*map(one, arrivals)))

    return asyncio.run(serve())


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of Poisson arrivals; `rate` per second."""
    draw, times = random.Random(seed), list[float]()
    while (at_s := (times[-1] if times else 0.0) + draw.expovariate(rate)) < seconds:
        times.append(at_s)
    return times
