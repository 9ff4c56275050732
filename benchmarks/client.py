"""A streaming client for benchmarks: the time of every token."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx

from flying_serving.testing.sse import EventStream
from tests.streams import RequestFailed, streamed

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


def prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of random token ids that no other seed shares a prefix with."""
    draw = random.Random(seed)
    return [draw.randrange(300, 500) for _ in range(tokens)]


async def stream(client: httpx.AsyncClient, model: str, token_ids: list[int], max_tokens: int) -> Stream:
    """Send one request and read it to its end.

    Raises:
        RequestFailed: if it failed or stopped early.
    """
    body = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }
    result = Stream(time.monotonic())
    async with streamed(client, body, EventStream()) as events:
        async for event in events:
            result.token_s += [time.monotonic()] * sum(choice.tokens for choice in event.choices)
    if len(result.token_s) != max_tokens:
        raise RequestFailed(f"{len(result.token_s)} of {max_tokens} tokens came")
    return result


def run_streams(url: str, model: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Stream], float]:
    """Send all prompts at once. Returns the streams and output tokens per second over the whole."""

    async def together() -> tuple[list[Stream], float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=ANSWER_S) as client:
            started = time.monotonic()
            streams = await asyncio.gather(*(stream(client, model, p, max_tokens) for p in prompts))
            return list(streams), len(prompts) * max_tokens / (time.monotonic() - started)

    return asyncio.run(together())
